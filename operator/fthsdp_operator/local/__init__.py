"""``fthsdp run``: a job on this machine, its pods as processes and its rules the operator's own.

``command`` reads the command line, ``session`` runs the job, ``cluster`` is this machine in place of an API server:
``objects`` its storage, ``kubelet`` what starts and stops pods (``containers`` and ``addresses`` translate their
manifests, ``process`` and ``shim`` hold their processes, ``podstatus`` writes their status). ``manifest`` reads the
job, ``folder`` is where everything is put, ``inject`` orders faults, ``view`` and ``screen`` show the run.
"""
