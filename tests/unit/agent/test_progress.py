"""What is made of a heartbeat slot over time."""

from perdure.agent.progress import Progress, Work, is_stopped, limit_of, seen, stall, worked
from perdure.vocab.job import StallRules
from perdure.wire.layouts import LoopPhase
from tests.unit.agent.a_node import reading

RULES = StallRules()


def stepping(count: int, seconds: float = 1.0) -> Progress:
    progress = Progress(since=0.0)
    for step in range(count + 1):
        progress = seen(progress, reading(1, step, step_at=step * seconds), "S", step * seconds)
    return progress


def test_step_times_are_learned_from_the_slot() -> None:
    assert stepping(12, 0.5).step_seconds() == 0.5


def test_steps_between_two_looks_are_counted_each() -> None:
    progress = seen(stepping(1), reading(1, 11, step_at=11.0), "S", 11.0)
    assert progress.steps[-1] == 1.0


def test_time_in_a_checkpoint_is_no_step_time() -> None:
    progress = stepping(3)
    progress = seen(progress, reading(1, 3, phase=LoopPhase.CHECKPOINT, phase_at=3.0, step_at=3.0), "S", 3.0)
    progress = seen(progress, reading(1, 3, phase_at=60.0, step_at=3.0), "S", 60.0)
    progress = seen(progress, reading(1, 4, phase_at=60.0, step_at=61.0), "S", 61.0)
    assert progress.steps[-1] == 1.0
    assert ("checkpoint", 57.0) in progress.phases


def test_an_equal_reading_is_no_progress() -> None:
    progress = stepping(3)
    assert seen(progress, reading(1, 3, step_at=3.0), "S", 50.0).since == progress.since


def test_a_beat_is_progress() -> None:
    assert seen(stepping(3), reading(1, 3, step_at=3.0, beats=1), "S", 50.0).since == 50.0


def test_a_learned_limit_passes() -> None:
    progress = stepping(12)
    assert stall(progress, "S", progress.since + 5.0, RULES) is None
    assert stall(progress, "S", progress.since + 5.1, RULES) == limit_of(progress, RULES)


def test_work_stretches_a_learned_limit_and_not_for_ever() -> None:
    progress = stepping(12)
    busy = worked(worked(progress, Work(0.0, 0, 0, 0), 13.0), Work(30.0, 0, 0, 0), 40.0)
    assert stall(busy, "R", progress.since + 24.9, RULES) is None
    assert stall(busy, "R", progress.since + 25.1, RULES) is not None


def test_idle_counters_are_no_work() -> None:
    progress = worked(worked(stepping(3), Work(0.0, 0, 0, 0), 4.0), Work(0.005, 10, 100, 0), 5.0)
    assert progress.worked_at is None


def test_work_from_before_the_silence_is_no_evidence() -> None:
    progress = worked(Progress(since=0.0), Work(0.0, 0, 0, 0), 0.0)
    progress = seen(progress, reading(1, 3, step_at=50.0), "S", 50.0)
    progress = worked(progress, Work(40.0, 0, 0, 0), 55.0)
    assert progress.worked_at is None
    assert worked(progress, Work(41.0, 0, 0, 0), 56.0).worked_at == 56.0


def test_state_t_lasts_from_the_first_look_that_saw_it() -> None:
    progress = seen(stepping(3), reading(1, 3, step_at=3.0), "T", 10.0)
    progress = seen(progress, reading(1, 3, step_at=3.0), "T", 10.3)
    assert not is_stopped(progress, 10.4, RULES)
    assert is_stopped(progress, 10.5, RULES)
    assert not is_stopped(seen(progress, reading(1, 3, step_at=3.0), "S", 10.4), 10.5, RULES)
