"""The coordinator: who is a member, under which epoch number, and how a broken step ends.

``messages`` is what is said. ``membership`` is the pure state machine that makes every decision: ``events`` go in,
``facts`` are what it knows, ``decide`` makes the next epoch, which survives as the ``ledger`` in a ``store`` (a file,
or with ``configmap_store`` an object of Kubernetes). ``server`` is the shell around it, ``client`` the leaders' and the
operator's side. ``record`` is what a run leaves behind, ``archive`` the folder for it. Everything here works without
torch.
"""
