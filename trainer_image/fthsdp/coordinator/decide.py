"""Which epoch comes next: after a break (``decide``), or as planned (``propose``).

Both are functions of what the members report and of the epoch they are in. A decision is made from fenced reports only,
so nothing in them can change while it is made:

- The step that counts is the furthest one of a member that can serve it. Who is behind fetches it from such a member
  (roll forward); who is at it keeps its gradients and tries the next step again.
- A member that became full by replay and has not applied a step of its own serves nobody, and its step does not count
  while that of another member does. If only such members are left, the furthest of them is the state.
- The next step keeps the list under which it began anywhere, and who of that list is left is noted beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fthsdp.coordinator.messages import Assigned, EpochRecord, Member, MemberState, Outcome, Role

__all__ = ["decide", "may_leave", "propose"]


def decide(
    states: Mapping[int, MemberState],
    *,
    members: Mapping[int, Member],
    base: EpochRecord,
    number: int,
    wanted: int,
    least: int,
) -> EpochRecord | None:
    """Return the epoch that follows a break, or None when nobody who is left has a state.

    ``states`` are the fenced reports by replica, ``members`` says who these replicas are, ``base`` is the newest epoch
    that had begun, ``wanted`` and ``least`` are the numbers of active replicas to aim at and to train with.
    """
    if base.paused:
        gone = may_leave(states)
        states = {r: s for r, s in states.items() if r not in gone}
    steps = {r: s.step for r, s in states.items() if s.step is not None}
    if not steps:
        return None
    serving = {r: n for r, n in steps.items() if states[r].serves}
    step = max((serving or steps).values())
    ready = serving.keys() | {r for r, n in steps.items() if n == step}
    active = _active(base, sorted(ready, key=lambda r: (steps[r] != step, r)), wanted)
    return EpochRecord(
        number=number,
        members=tuple(_with_role(members[r], r in active) for r in sorted(states)),
        wanted=wanted,
        paused=len(active) < least,
        outcome=Outcome(
            step=step,
            source=_source(serving, states, step),
            serving=bool(serving),
            assigned=_assigned(states, base, step + 1, active),
        ),
        # A paused job takes in newcomers here, and one of them may be a donor's next attempt: it has no state yet.
        snapshots=tuple(
            r for r in sorted(states) if _starts_over(states[r], step, serving=bool(serving), present=steps.keys())
        ),
    )


def _active(base: EpochRecord, ready: Sequence[int], wanted: int) -> set[int]:
    """Who was active stays so; ready shadows fill the gaps at the same decision, the first of ``ready`` first."""
    active = [r for r in base.active if r in ready]
    spares = [r for r in ready if r not in active]
    return {*active, *spares[: max(wanted - len(active), 0)]}


def _source(serving: Mapping[int, int], states: Mapping[int, MemberState], step: int) -> int | None:
    if all(state.step == step for state in states.values()):
        return None
    return min((r for r, n in serving.items() if n == step), default=None)


def _assigned(
    states: Mapping[int, MemberState], base: EpochRecord, step: int, active: Collection[int]
) -> Assigned | None:
    """Return the list under which ``step`` began, with those noted who are left of it; None if it has not begun.

    Who has not yet entered the epoch of an earlier retry knows a shorter chain of survivors than who has.
    """
    lists = {s.begun for s in states.values() if s.step is not None and s.begun is not None and s.begun.step == step}
    if not lists:
        return None
    carried = base.outcome.assigned if base.outcome is not None else None
    longest = max((*lists, carried) if carried is not None and carried.step == step else lists, key=_num_retries)
    for known in lists:
        same = longest.model_copy(update={"survivors": longest.survivors[: len(known.survivors)]})
        assert known == same, f"step {step} began under several lists: {known!r}, {longest!r}"
    before = longest.survivors[-1] if longest.survivors else longest.replicas
    left = tuple(r for r in before if r in active)
    # With nobody left there is nobody who could take over: the samples wait for the step after.
    chain = longest.survivors if left in ((), before) else (*longest.survivors, left)
    return longest.model_copy(update={"survivors": chain})


def _num_retries(assigned: Assigned) -> int:
    return len(assigned.survivors)


def _starts_over(state: MemberState, step: int, *, serving: bool, present: Collection[int]) -> bool:
    """Whether this member needs new stripes: what it has is undone, not to be had, or nobody can bring it forward."""
    if state.step is not None:
        return state.step > step or (state.step < step and not serving)
    if _lacks_donors(state, present):
        return True
    assert state.catching_up is not None
    since, at = state.catching_up.since, state.catching_up.at
    return not (at == step or (at == step - 1 and serving) or (at == step + 1 > since + 1))


def _lacks_donors(state: MemberState, present: Collection[int]) -> bool:
    """Whether a shadow's stripes cannot be had from those who are present."""
    return state.catching_up is None or not set(state.catching_up.donors) <= set(present)


def _with_role(member: Member, active: bool) -> Member:
    return member.model_copy(update={"role": Role.ACTIVE if active else Role.SHADOW})


def may_leave(states: Mapping[int, MemberState], *, newcomers: bool = False) -> frozenset[int]:
    """Return who of those who ask to leave can go now.

    Who has the state stays as long as nobody else has it and there is somebody to whom it can be given: one of the
    members in ``states``, or newcomers.
    """
    leaving = frozenset(r for r, s in states.items() if s.leaving)
    others = [s for r, s in states.items() if r not in leaving]
    if any(s.step is not None for s in others) or not (others or newcomers):
        return leaving
    return frozenset(r for r in leaving if states[r].step is None)


def propose(
    states: Mapping[int, MemberState],
    *,
    base: EpochRecord,
    joiners: Sequence[Member],
    stranded: Sequence[int],
    number: int,
    wanted: int,
    least: int,
) -> EpochRecord | None:
    """Return the planned epoch after ``base``, or None when nothing is to be changed.

    It takes in the joiners as shadows, makes ready shadows active (or, where fewer are wanted by now, the highest
    active ones spares), lets go who asked to leave, and has new stripes taken for shadows in ``stranded``. When
    everybody has asked to leave, it has no members.
    """
    gone = may_leave(states, newcomers=bool(joiners))
    staying = [m for m in base.members if m.replica not in gone]
    active = {m.replica for m in staying if m.role is Role.ACTIVE}
    ready = [m.replica for m in staying if m.role is Role.SHADOW and states[m.replica].step is not None]
    promoted = sorted(ready)[: max(wanted - len(active), 0)]
    active.update(promoted)
    demoted = sorted(active)[wanted:]
    active.difference_update(demoted)
    removed = len(staying) < len(base.members)
    if not (joiners or stranded or promoted or demoted or removed):
        return None
    if not active:
        return EpochRecord(number=number, members=(), wanted=wanted)
    members = [*(_with_role(m, m.replica in active) for m in staying), *(_with_role(j, False) for j in joiners)]
    present = {m.replica for m in staying}
    empty = [r for r in present if states[r].step is None and _lacks_donors(states[r], present)]
    snapshots = {*(j.replica for j in joiners), *stranded, *(empty if removed else ())}
    return EpochRecord(
        number=number,
        members=tuple(sorted(members, key=lambda m: m.replica)),
        wanted=wanted,
        paused=len(active) < least,
        snapshots=tuple(sorted(snapshots)),
    )
