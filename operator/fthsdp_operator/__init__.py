"""The operator, and the command line.

A job's manifest (``api``) and what is there of it (``observed``) go into ``rules``, whose ``plan`` says what is to be
done; ``manifests`` says what the objects look like. ``execute`` carries a plan out on a ``cluster``: an API server
(``kube``, with what ``informers`` have seen of it), or this machine (``local``). ``process`` is the operator around
that: what wakes it, its queue, probes and metrics. ``reports`` tells how a run went, ``preview`` what would be done,
``cli`` is the command ``fthsdp``; ``crd`` and ``reference`` write the definition of an FTHSDPJob and its documentation.
"""
