"""Events, actions and times in plain words, one short sentence each. It chooses nothing and keeps nothing."""

from datetime import UTC, datetime
from signal import Signals
from typing import assert_never

from perdure.vocab import event as e
from perdure.vocab.checkpoint import Level
from perdure.vocab.decision import (
    AnyAction,
    Begin,
    Drain,
    Escalate,
    Finish,
    GiveUp,
    Grow,
    Hold,
    LetFinish,
    Quarantine,
    ReplaceNode,
    Requeue,
    RestartInProcess,
    RestartWorkers,
    RetryStep,
    Shrink,
)
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant, show_bytes, show_duration

SOME_NODES = 4
"""More names than these are counted, not listed."""


def nodes(names: tuple[NodeId, ...]) -> str:
    """`node-0, node-1`, or `64 nodes`."""
    return ", ".join(names) if len(names) <= SOME_NODES else f"{len(names)} nodes"


def ranks(assignment: Assignment) -> str:
    count = assignment.world_size
    return f"{count} rank{'' if count == 1 else 's'} on {nodes(assignment.nodes)}"


def since(start: Instant, at: Instant) -> str:
    """Time in the job, as in `+12.41 s`."""
    return f"{'-' if at < start else '+'}{show_duration(abs(at - start))}"


def time_of_day(at: Instant) -> str:
    """UTC, because the job's machines may disagree on anything else."""
    return f"{datetime.fromtimestamp(at, tz=UTC):%H:%M:%S}"


def date(at: Instant) -> str:
    return f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"


def minute(at: Instant) -> str:
    """Date and time of day in UTC, as in `2026-11-30 19:38`."""
    return f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d %H:%M}"


def ending(exit_code: int | None, signal: int | None) -> str:
    """How a process ended, as in `exit code 1` or `SIGKILL`."""
    if signal is None:
        return f"exit code {exit_code}"
    return Signals(signal).name if signal in set(Signals) else f"signal {signal}"


def describe(event: e.AnyEvent) -> str:
    """What happened."""
    match event:
        case (
            e.WorkerExited()
            | e.WorkerStopped()
            | e.WorkerStalled()
            | e.WorkerUnkillable()
            | e.WorkersStarted()
            | e.StepsBegun()
            | e.CaughtUp()
            | e.SavePassed()
            | e.StartFailed()
        ):
            return _of_workers(event)
        case (
            e.NodeJoined()
            | e.NodeDisconnected()
            | e.NodeLost()
            | e.NodeLeft()
            | e.NodeRefused()
            | e.NodeReady()
            | e.NodeGathered()
            | e.NodeFenced()
            | e.DrainAcked()
            | e.StoreLost()
            | e.ForkServerLost()
        ):
            return _of_node(event)
        case (
            e.JobSubmitted()
            | e.ControlStarted()
            | e.StopRequested()
            | e.TimePassed()
            | e.GenerationBegan()
            | e.GenerationRunning()
            | e.EndDecided()
            | e.JobEnded()
        ):
            return _of_job(event)
        case (
            e.CheckpointCommitted()
            | e.CheckpointSkipped()
            | e.CheckpointStored()
            | e.CheckpointChosen()
            | e.CheckpointRestored()
            | e.CheckpointSetAside()
            | e.CheckpointTrouble()
        ):
            return _of_checkpoint(event)
        case _:
            assert_never(event)


_OfCheckpoint = (
    e.CheckpointCommitted
    | e.CheckpointSkipped
    | e.CheckpointStored
    | e.CheckpointChosen
    | e.CheckpointRestored
    | e.CheckpointSetAside
    | e.CheckpointTrouble
)
_OfWorkers = (
    e.WorkerExited
    | e.WorkerStopped
    | e.WorkerStalled
    | e.WorkerUnkillable
    | e.WorkersStarted
    | e.StepsBegun
    | e.CaughtUp
    | e.SavePassed
    | e.StartFailed
)
_OfNode = (
    e.NodeJoined
    | e.NodeDisconnected
    | e.NodeLost
    | e.NodeLeft
    | e.NodeRefused
    | e.NodeReady
    | e.NodeGathered
    | e.NodeFenced
    | e.DrainAcked
    | e.StoreLost
    | e.ForkServerLost
)
_OfJob = (
    e.JobSubmitted
    | e.ControlStarted
    | e.StopRequested
    | e.TimePassed
    | e.GenerationBegan
    | e.GenerationRunning
    | e.EndDecided
    | e.JobEnded
)


def _of_workers(event: _OfWorkers) -> str:
    match event:
        case e.WorkerExited():
            step = "" if event.step is None else f" after step {event.step}"
            return f"rank {event.rank} on {event.node} ended with {ending(event.exit_code, event.signal)}{step}"
        case e.WorkerStopped():
            return f"rank {event.rank} on {event.node} has been stopped for {show_duration(event.stopped_for)}"
        case e.WorkerStalled():
            return (
                f"rank {event.rank} on {event.node} has made no progress in {event.phase}"
                f" for {show_duration(event.silent_for)}"
            )
        case e.WorkerUnkillable():
            return f"rank {event.rank} on {event.node} outlived SIGKILL for {show_duration(event.waited)}"
        case e.WorkersStarted():
            return f"{event.node} started {len(event.pids)} workers"
        case e.StepsBegun():
            return f"{event.node} has done its first step, {event.step}"
        case e.CaughtUp():
            return f"{event.node} has caught up at step {event.step}"
        case e.SavePassed():
            return f"{event.node} saved at step {event.step}"
        case e.StartFailed():
            return f"{event.node} could not start its workers: {event.reason}"
        case _:
            assert_never(event)


def _of_node(event: _OfNode) -> str:
    match event:
        case e.NodeJoined():
            return f"{event.node.id} joined"
        case e.NodeDisconnected():
            return f"{event.node}'s connection was closed"
        case e.NodeLost():
            return f"{event.node} was lost after {show_duration(event.silent_for)} of silence"
        case e.NodeLeft():
            return f"{event.node} left" + (f": {event.reason}" if event.reason else "")
        case e.NodeRefused():
            return f"{event.node} was refused: {event.reason}"
        case e.NodeReady() | e.NodeGathered() | e.DrainAcked():
            return f"{event.node} is ready"
        case e.NodeFenced():
            return f"{event.node} heard nobody for {show_duration(event.silent_for)} and ended its workers"
        case e.StoreLost():
            return f"the store on {event.node} ended with {ending(event.exit_code, event.signal)}"
        case e.ForkServerLost():
            return f"the fork server on {event.node} ended with {ending(event.exit_code, event.signal)}"
        case _:
            assert_never(event)


def _of_job(event: _OfJob) -> str:
    match event:
        case e.JobSubmitted():
            return "the job was submitted"
        case e.ControlStarted():
            return "control started"
        case e.StopRequested():
            return f"{event.by}: asked to stop"
        case e.TimePassed():
            return f"the {event.deadline.replace('_', ' ')} deadline passed"
        case e.GenerationBegan():
            return f"generation {event.assignment.number} began: {ranks(event.assignment)}"
        case e.GenerationRunning():
            return f"generation {event.generation} is running"
        case e.EndDecided():
            until = show_duration(max(0.0, event.until - event.at))
            return f"the newest checkpoint goes to storage before the end, for {until} at most"
        case e.JobEnded():
            return f"ended with exit code {event.exit_code}: {event.reason}"
        case _:
            assert_never(event)


_SURVIVES = {
    Level.SEALED: "survives the end of a process",
    Level.REPLICATED: "survives the loss of a node",
    Level.DURABLE: "is in storage",
}


def _of_checkpoint(event: _OfCheckpoint) -> str:
    match event:
        case e.CheckpointCommitted():
            size = show_bytes(event.nbytes)
            took = "" if event.seconds is None else f" after {show_duration(event.seconds)}"
            kept = "" if event.stall is None else f"; the copy kept the training for {show_duration(event.stall)}"
            return f"the checkpoint of {event.checkpoint} is committed{took}: {size}, {_SURVIVES[event.level]}{kept}"
        case e.CheckpointSkipped():
            return f"the checkpoint of {event.checkpoint} was skipped: no free slot on {nodes(event.nodes)}"
        case e.CheckpointStored():
            took = "" if event.seconds is None else f" after {show_duration(event.seconds)}"
            return f"the checkpoint of {event.checkpoint} is in storage{took}: {event.path}, {show_bytes(event.nbytes)}"
        case e.CheckpointChosen():
            return _chosen(event)
        case e.CheckpointRestored():
            took = f"{event.checkpoint} is restored on all ranks after {show_duration(event.seconds)}"
            sizes = {source: show_bytes(sum(by_rank.values())) for source, by_rank in event.sources.items()}
            return f"{took}: {', '.join(f'{size} from {source}' for source, size in sizes.items()) or 'nothing'}"
        case e.CheckpointSetAside():
            return f"the checkpoint of {event.checkpoint} is set aside as bad: {event.reason}"
        case e.CheckpointTrouble():
            return f"checkpoints on {event.node}: {event.what}"
        case _:
            assert_never(event)


def _chosen(event: e.CheckpointChosen) -> str:
    if event.checkpoint is None:
        return f"generation {event.generation} begins at step 0: there is no checkpoint yet"
    where = f"{event.from_memory} rank(s) from memory" if event.from_memory else "from storage"
    if event.rebuilt:
        where += f", {len(event.rebuilt)} made again from parity"
    lost = f"; random numbers and data position of {len(event.missing)} rank(s) are made anew" if event.missing else ""
    return f"generation {event.generation} restores the checkpoint of {event.checkpoint}, {where}{lost}"


def act(action: AnyAction) -> str:
    """What is done."""
    match action:
        case RestartWorkers():
            return f"all workers start anew as generation {action.assignment.number}"
        case RestartInProcess():
            return f"the workers begin again in process as generation {action.assignment.number}"
        case ReplaceNode():
            return (
                f"{nodes(action.spares)} took the ranks of {nodes(action.lost)}, generation {action.assignment.number}"
            )
        case Shrink():
            return f"going on without {nodes(action.lost)}: {ranks(action.assignment)}"
        case Grow():
            return f"{nodes(action.joined)} taken in: {ranks(action.assignment)}"
        case Begin():
            return f"generation {action.assignment.number} begins: {ranks(action.assignment)}"
        case RetryStep():
            return "the step is tried again"
        case Hold() | Requeue() | Drain() | GiveUp() | Finish() | Quarantine() | LetFinish() | Escalate():
            return _act_without_generation(action)
        case _:
            assert_never(action)


def _act_without_generation(
    action: Hold | Requeue | Drain | GiveUp | Finish | Quarantine | LetFinish | Escalate,
) -> str:
    match action:
        case Hold():
            return f"on hold until {time_of_day(action.until)} UTC for {action.lacking} more node(s)"
        case Requeue():
            return "a new attempt without " + nodes(action.exclude)
        case Drain():
            return "the workers save and end"
        case GiveUp():
            return f"the job ends with exit code {action.exit_code}"
        case Finish():
            return "the job is done"
        case Quarantine():
            return f"{action.node} gets no more work until someone has looked at it"
        case LetFinish():
            return f"nothing to do: {len(action.ranks)} rank(s) have ended well"
        case Escalate():
            return "left to the next higher scope"
        case _:
            assert_never(action)
