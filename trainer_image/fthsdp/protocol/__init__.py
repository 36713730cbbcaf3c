"""The step protocol as a member lives it: what a leader promises and what each rank does, from boundary to boundary.

Everything here is pure. ``leader`` is a state machine: an event in, effects out. ``steploop`` is a coroutine: wherever
a rank has to wait it yields a request (``requests``), and goes on with the answer. Whoever runs them, threads and
sockets in ``fthsdp.rank`` and ``fthsdp.replica`` or the simulation in simulated time, runs exactly this code. The
coordinator's side is ``fthsdp.coordinator.membership``.
"""
