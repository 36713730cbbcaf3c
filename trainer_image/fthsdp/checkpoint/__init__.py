"""Durable checkpoints of a job, with torch.distributed.checkpoint (DCP).

``checkpoints`` is what the step loop uses, ``folder`` which checkpoints are whole, ``shards`` what is in their files.
"""

from fthsdp.checkpoint.checkpoints import Checkpoints, Loaded
from fthsdp.checkpoint.folder import Stored, newest

__all__ = ["Checkpoints", "Loaded", "Stored", "newest"]
