"""The operator, and the command line.

A job's manifest (``api``) and what is there of it (``observe``) go into the rules (``plan``, with ``policy`` for what a
failure costs and ``render`` for what objects look like); ``execute`` carries out what comes of it on a ``cluster``.
That is an API server (``apiserver``) with ``handlers`` and ``queue`` around it, or this machine (``local``).
``report``, ``history``, ``summary``, ``picture`` and ``cluster_record`` tell how a run went, ``cli`` is the command
``fthsdp``, and ``crd`` writes the definition of an FTHSDPJob.
"""
