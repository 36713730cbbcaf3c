"""Fault-tolerant HSDP: what runs inside the pods."""
