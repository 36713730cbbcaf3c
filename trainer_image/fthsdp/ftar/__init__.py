"""FTAR: collectives across replicas that can end early, driven by the CPU over TCP.

``schedule`` says who sends what when, ``collective`` and ``reduce`` know the tensors, ``frames`` and ``connection`` the
wire, ``ring`` puts them together for one epoch, and ``engine`` moves the rings of a rank in one thread.
"""

from fthsdp.ftar.collective import Work
from fthsdp.ftar.engine import Engine
from fthsdp.ftar.ring import RailMember
from fthsdp.ftar.settings import FtarSettings

__all__ = ["Engine", "FtarSettings", "RailMember", "Work"]
