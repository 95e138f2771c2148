"""Events to diagnoses: what broke, where, and why we think so. Knows nothing of what to do, nor of the job's shape."""

import re
from collections.abc import Sequence
from signal import Signals

from perdure.playbook.parse import Catalogue
from perdure.vocab.event import (
    AnyEvent,
    MemoryEvidence,
    NodeLeft,
    NodeLost,
    StartFailed,
    StoreLost,
    WorkerExited,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from perdure.vocab.fault import Diagnosis
from perdure.vocab.units import show_bytes, show_duration

# Texts of exceptions that say that a peer went away, not what happened to it: gloo and NCCL in torch 2.6 – 2.13.
_PEER_LOST = re.compile(
    r"connection (?:closed|reset|refused) by (?:remote )?peer|connection reset by peer|gloo.*(?:timed out|timeout)"
    r"|Application timeout caused pair closure|connectFullMesh|NCCL.*(?:remote error|system error|unhandled)"
    r"|Broken pipe|failed to connect to remote|socket has timed out|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def diagnose(events: Sequence[AnyEvent], catalogue: Catalogue) -> tuple[Diagnosis, ...]:
    """One diagnosis for each of `events` that is a fault, in their order."""
    found = (_diagnose_one(event, catalogue) for event in events)
    return tuple(diagnosis for diagnosis in found if diagnosis is not None)


def is_lost_peer(event: WorkerExited) -> bool:
    """Whether a worker's end says no more than that a peer went away."""
    return bool(_PEER_LOST.search(event.error.message if event.error is not None else event.log_tail))


def _diagnose_one(event: AnyEvent, catalogue: Catalogue) -> Diagnosis | None:
    match event:
        case WorkerExited(exit_code=0):
            return None
        case WorkerExited():
            return _worker_exited(event, catalogue)
        case WorkerStopped() | WorkerStalled() | WorkerUnkillable():
            return _worker_stuck(event, catalogue)
        case StoreLost() | StartFailed():
            return _start_or_store(event, catalogue)
        case NodeLost() | NodeLeft():
            return _node_gone(event, catalogue)
        case _:
            return None


def _worker_exited(event: WorkerExited, catalogue: Catalogue) -> Diagnosis:
    where = f"rank {event.rank} on {event.node} (pid {event.pid})"
    step = "" if event.step is None else f" after step {event.step}"
    if event.memory is not None:
        return _of_worker(
            event,
            catalogue,
            "worker.out-of-memory",
            f"{where} was killed for lack of memory{step}: {_figures(event.memory)}",
        )
    if event.error is not None:
        error = event.error
        first_line = error.message.strip().splitlines()[0] if error.message.strip() else ""
        what = f"{where} raised {error.type}: {first_line} at {error.where}{step}"
        if error.type in ("SyntaxError", "IndentationError", "TabError"):
            return _of_worker(event, catalogue, "worker.script-broken", what, detail=error.traceback)
        fault = "worker.peer-lost" if is_lost_peer(event) else "worker.exception"
        return _of_worker(event, catalogue, fault, what, f"{error.type} {error.where}", error.traceback)
    if event.signal is not None:
        name = Signals(event.signal).name if event.signal in set(Signals) else f"signal {event.signal}"
        fault = "worker.killed" if name == "SIGKILL" else "worker.signal"
        return _of_worker(event, catalogue, fault, f"{where} was ended by {name}{step}", name)
    what = f"{where} ended with exit code {event.exit_code}{step}"
    fault = "worker.peer-lost" if is_lost_peer(event) else "worker.exit-code"
    return _of_worker(event, catalogue, fault, what, f"exit {event.exit_code}")


def _of_worker(
    event: WorkerExited, catalogue: Catalogue, fault: str, what: str, mark: str = "", detail: str = ""
) -> Diagnosis:
    return Diagnosis(
        fault=catalogue[fault],
        node=event.node,
        rank=event.rank,
        generation=event.generation,
        step=event.step,
        evidence=(event.id,),
        confidence=0.6 if fault == "worker.peer-lost" else 1.0,
        what=what,
        # An exception is the same again wherever it is raised: all ranks run one script. All else belongs to its rank.
        fingerprint=f"{fault} {mark} step {event.step}" + ("" if event.error else f" rank {event.rank}"),
        counts_as_restart=True,
        exit_code=event.exit_code or (128 + event.signal if event.signal else 1),
        detail=detail or event.log_tail,
    )


def _figures(memory: MemoryEvidence) -> str:
    parts = [f"the {memory.by} killed it"]
    if memory.rss is not None:
        parts.append(f"it used {show_bytes(memory.rss)}")
    if memory.usage is not None and memory.limit is not None:
        parts.append(f"{show_bytes(memory.usage)} of {show_bytes(memory.limit)} were in use")
    elif memory.limit is not None:
        parts.append(f"the limit is {show_bytes(memory.limit)}")
    return ", ".join(parts)


def _worker_stuck(event: WorkerStopped | WorkerStalled | WorkerUnkillable, catalogue: Catalogue) -> Diagnosis:
    where = f"rank {event.rank} on {event.node} (pid {event.pid})"
    match event:
        case WorkerStopped():
            fault = "worker.stopped"
            what = f"{where} has been stopped (state T) for {show_duration(event.stopped_for)}"
        case WorkerStalled():
            fault = "worker.stalled"
            what = (
                f"{where} made no progress in {event.phase} for {show_duration(event.silent_for)}"
                f" (limit {show_duration(event.limit)}, {event.limit_source}; state {event.process_state})"
            )
        case WorkerUnkillable():
            fault = "worker.unkillable"
            what = f"{where} outlives SIGKILL for {show_duration(event.waited)} (state {event.process_state})"
    step = None if isinstance(event, WorkerUnkillable) else event.step
    return Diagnosis(
        fault=catalogue[fault],
        node=event.node,
        rank=event.rank,
        generation=event.generation,
        step=step,
        evidence=(event.id,),
        confidence=1.0 if fault != "worker.stalled" else 0.8,
        what=what,
        fingerprint=f"{fault} rank {event.rank} step {step}",
        counts_as_restart=fault != "worker.unkillable",
    )


def _start_or_store(event: StoreLost | StartFailed, catalogue: Catalogue) -> Diagnosis:
    if isinstance(event, StoreLost):
        fault, what, counts = "store.lost", f"the store of generation {event.generation} on {event.node} ended", True
    else:
        fault, what, counts = "worker.start-failed", f"{event.node} could not start its workers: {event.reason}", True
    return Diagnosis(
        fault=catalogue[fault],
        node=event.node,
        rank=None,
        generation=event.generation,
        step=None,
        evidence=(event.id,),
        confidence=1.0,
        what=what,
        fingerprint=f"{fault} {event.node}",
        counts_as_restart=counts,
    )


def _node_gone(event: NodeLost | NodeLeft, catalogue: Catalogue) -> Diagnosis:
    if isinstance(event, NodeLeft):
        fault, what = "node.left", f"{event.node} left: {event.reason or 'its agent was told to stop'}"
    elif event.connection_closed:
        fault = "node.lost"
        what = f"{event.node} closed its connection and did not come back within {show_duration(event.silent_for)}"
    else:
        fault, what = "node.silent", f"{event.node} has been silent for {show_duration(event.silent_for)}"
    return Diagnosis(
        fault=catalogue[fault],
        node=event.node,
        rank=None,
        generation=None,
        step=None,
        evidence=(event.id,),
        confidence=1.0,
        what=what,
        fingerprint=f"{fault} {event.node}",
        counts_as_restart=False,
    )
