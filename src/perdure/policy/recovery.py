"""The ladder: the lowest rung that can work for one diagnosis. Pure; knows neither events nor how a rung is done.

    restart workers → replace node → shrink → hold → give up

(Retry of a step and restart in process belong below, a new attempt above; they come with what can do them.)
"""

from perdure.policy import placement
from perdure.vocab.decision import (
    AnyAction,
    Decision,
    GiveUp,
    Hold,
    Quarantine,
    ReplaceNode,
    RestartWorkers,
    Shrink,
)
from perdure.vocab.fault import Diagnosis, Remedy, Scope
from perdure.vocab.ids import ActionId, NodeId
from perdure.vocab.job import RecoveryRules
from perdure.vocab.units import Instant, show_duration
from perdure.vocab.view import JobView

CLIMB_AFTER = 3
"""Times that the same fault at the same rank and step is answered on one rung. Source: the design's ladder."""
STOP_AFTER = 2 * CLIMB_AFTER
"""Times after which going on cannot help, however long each takes: peers went through 44 identical cycles."""


def recover(job: JobView, diagnosis: Diagnosis, now: Instant, rules: RecoveryRules) -> Decision:
    """Choose the cheapest recovery that can work.

    Answers each event once: action ids are made from generation and that event's id.
    """
    reason = _must_stop(job, diagnosis, now, rules)
    if reason is not None:
        return _decide(
            diagnosis, now, reason, GiveUp(id=_id(job, diagnosis), exit_code=diagnosis.exit_code, reason=reason)
        )
    if diagnosis.fault.scope is Scope.NODE:
        return without_nodes(job, diagnosis, now, rules)
    assert job.assignment is not None
    missing = _missing_members(job)
    seen = _times_seen(job, diagnosis, now, rules)
    if missing:
        return without_nodes(job, diagnosis, now, rules)
    if seen + 1 >= CLIMB_AFTER and job.spares and diagnosis.node in job.assignment.nodes:
        return _climb_to_replacement(job, diagnosis, now, seen + 1)
    title = diagnosis.fault.title.lower()
    used = len(_restarts_in_window(job, now, rules)) + (1 if diagnosis.counts_as_restart else 0)
    budget = f"restart {used} of {rules.max_restarts}" if diagnosis.counts_as_restart else "not counted as a restart"
    return _decide(
        diagnosis,
        now,
        f"{title}; all nodes are fit, so all workers start anew from the fork servers ({budget})",
        RestartWorkers(id=_id(job, diagnosis), assignment=placement.again(job.next_number, job.assignment)),
    )


def _must_stop(job: JobView, diagnosis: Diagnosis, now: Instant, rules: RecoveryRules) -> str | None:
    """Why going on makes no sense, if so."""
    fault = diagnosis.fault
    if fault.remedy is Remedy.STOP:
        return f"{diagnosis.what}; {fault.meaning[0].lower()}{fault.meaning[1:]}"
    lately = (past for past in job.past if now - past.at < rules.restart_window)
    if fault.remedy is Remedy.RETRY_ONCE and any(past.fault == fault.id for past in lately):
        return f"{diagnosis.what}; it had been retried once already. {fault.action}"
    if fault.id == "worker.exception" and _times_seen(job, diagnosis, now, rules) >= 1:
        return f"{diagnosis.what}; the same exception at the same line and step came back after one retry"
    times = _times_seen(job, diagnosis, now, rules) + 1
    if diagnosis.step is not None and times >= STOP_AFTER and fault.id != "worker.killed":
        which = f"{times}{_ordinal(times)}"
        return f"{diagnosis.what}; it is the {which} time at the same rank and step, and nothing has helped"
    if diagnosis.counts_as_restart:
        used = len(_restarts_in_window(job, now, rules))
        if used >= rules.max_restarts:
            return (
                f"{diagnosis.what}; {used} of {rules.max_restarts} restarts in {show_duration(rules.restart_window)}"
                " are used up (--max-restarts, --restart-window)"
            )
    return None


def _restarts_in_window(job: JobView, now: Instant, rules: RecoveryRules) -> tuple[Instant, ...]:
    return tuple(at for at in job.restarts if now - at < rules.restart_window)


def _times_seen(job: JobView, diagnosis: Diagnosis, now: Instant, rules: RecoveryRules) -> int:
    """How often the same thing was answered before. Without a step "the same" means little: then only lately counts."""
    return sum(
        past.fingerprint == diagnosis.fingerprint and (past.step is not None or now - past.at < rules.restart_window)
        for past in job.past
    )


def _missing_members(job: JobView) -> tuple[NodeId, ...]:
    if job.assignment is None:
        return ()
    return tuple(node for node in job.assignment.nodes if node not in job.present)


def _climb_to_replacement(job: JobView, diagnosis: Diagnosis, now: Instant, times: int) -> Decision:
    assert job.assignment is not None
    spare = job.spares[0]
    by = {diagnosis.node: spare}
    return _decide(
        diagnosis,
        now,
        f"{diagnosis.fault.title.lower()} for the {times}{_ordinal(times)} time at the same rank and step:"
        f" restarting workers has not helped, so {spare} takes the ranks of {diagnosis.node}",
        ReplaceNode(
            id=_id(job, diagnosis),
            assignment=placement.replace_nodes(job.next_number, job.assignment, by),
            lost=(diagnosis.node,),
            spares=(spare,),
        ),
    )


def without_nodes(job: JobView, diagnosis: Diagnosis, now: Instant, rules: RecoveryRules) -> Decision:
    """Go on without the members that are gone or unfit: by spares, else with fewer nodes, else wait for one."""
    assert job.assignment is not None
    gone = _missing_members(job)
    unfit: tuple[AnyAction, ...] = ()
    if diagnosis.fault.id == "worker.unkillable":
        gone = tuple(n for n in job.assignment.nodes if n in gone or n == diagnosis.node)
        unfit = (Quarantine(id=_id(job, diagnosis, "-quarantine"), node=diagnosis.node, reason=diagnosis.what),)
    title = diagnosis.fault.title.lower()
    spares = tuple(s for s in job.spares if s != diagnosis.node)
    if not gone:
        action: AnyAction = RestartWorkers(
            id=_id(job, diagnosis), assignment=placement.again(job.next_number, job.assignment)
        )
        return _decide(diagnosis, now, f"{title}, but the node is back: all workers start anew", action)
    if len(spares) >= len(gone):
        taken = spares[: len(gone)]
        action = ReplaceNode(
            id=_id(job, diagnosis),
            assignment=placement.replace_nodes(job.next_number, job.assignment, dict(zip(gone, taken, strict=True))),
            lost=gone,
            spares=taken,
        )
        return _decide(diagnosis, now, f"{title}; {_names(taken)} can take the ranks of {_names(gone)}", action, *unfit)
    staying = tuple(n for n in job.assignment.nodes if n not in gone)
    nodes = (*staying, *spares)
    if len(nodes) >= job.spec.min_nodes:
        action = Shrink(
            id=_id(job, diagnosis),
            assignment=placement.resize(job.next_number, job.assignment, nodes, job.spec.workers_per_node),
            lost=gone,
        )
        why = f"{title}; too few spares, and {len(nodes)} nodes are at least the minimum of {job.spec.min_nodes}"
        return _decide(diagnosis, now, why, action, *unfit)
    lacking = job.spec.min_nodes - len(nodes)
    action = Hold(id=_id(job, diagnosis), until=now + rules.hold, lacking=lacking)
    why = (
        f"{title}; no spare, and {len(nodes)} nodes are fewer than the minimum of {job.spec.min_nodes}:"
        f" the job waits up to {show_duration(rules.hold)} for {lacking} more"
    )
    return _decide(diagnosis, now, why, action, *unfit)


def _ordinal(number: int) -> str:
    return "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _names(nodes: tuple[NodeId, ...]) -> str:
    return ", ".join(nodes)


def _id(job: JobView, diagnosis: Diagnosis, suffix: str = "") -> ActionId:
    return ActionId(f"1-{job.next_number}-{diagnosis.evidence[0]}{suffix}")


def _decide(diagnosis: Diagnosis, now: Instant, because: str, *actions: AnyAction) -> Decision:
    return Decision(at=now, answers=diagnosis.evidence[0], because=because, actions=actions, diagnosis=diagnosis)
