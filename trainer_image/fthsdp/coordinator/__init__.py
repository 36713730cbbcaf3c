"""The coordinator: who is a member, under which epoch number, and how a broken step ends.

``messages`` is what is said, ``membership`` the pure state machine that makes every decision, ``server`` its shell,
``client`` the operator's side, ``store`` where the epoch record survives, ``record`` what a run leaves behind.
Everything here works without torch.
"""
