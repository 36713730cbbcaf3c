"""The main process of a container whose command may be restarted in place: ``python -m fthsdp.launcher -- COMMAND``.

It runs the command as its child. When the child crashes it stays, tells the coordinator how that ended, and waits for
the number of a new attempt, which the operator puts on the pod; then it starts the command again, in the same
container. Without one it ends as the child did, and everything is as it would be without a launcher.

``supervisor`` is its loop, ``processes`` what it does to process trees, ``attempts`` where numbers come from and what
they change, ``report`` what the coordinator is told, ``words`` passes standard error on and keeps the end of it.
``command`` finds out whether an interpreter that waits can run the command; ``warm`` keeps one, ``template`` is what it
runs. Nothing here imports torch but that one.
"""
