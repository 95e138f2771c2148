"""The worker's words, read by the agent's side of the page."""

import os
import weakref
from collections.abc import Iterator

import pytest

from perdure.errors import ConfigError, HostError
from perdure.trainer.heartbeat import Heartbeat, current
from perdure.trainer.progress import StepCounter
from perdure.trainer.session import Run
from perdure.wire.layouts import NO_STEP, LoopPhase
from perdure.wire.page import HeartbeatPage


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    page = HeartbeatPage(2)
    yield page
    page.close()


def attached(page: HeartbeatPage, slot: int = 1) -> Heartbeat:
    heartbeat = Heartbeat()
    heartbeat.attach(page.fd, slot, 4)
    return heartbeat


def test_attach_shows_pid_generation_and_start_up(page: HeartbeatPage) -> None:
    attached(page)
    slot = page.read(1)
    assert (slot.pid, slot.generation, slot.phase, slot.step) == (os.getpid(), 4, LoopPhase.START_UP, NO_STEP)
    assert page.read(0).pid == 0


def test_attach_to_a_slot_that_is_not_there_is_refused(page: HeartbeatPage) -> None:
    with pytest.raises(HostError, match="too few"):
        Heartbeat().attach(page.fd, 2, 1)


def test_attach_to_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(HostError, match="no heartbeat page"):
        Heartbeat().attach(fd, 0, 1)
    os.close(fd)


def test_steps_go_from_first_step_to_training_to_done(page: HeartbeatPage) -> None:
    run = Run(attached(page), {})
    seen = []
    for step in run.steps(start=7, stop=9):
        slot = page.read(1)
        seen.append((step, slot.step, slot.phase, slot.first_step, slot.tells))
    assert seen == [(7, NO_STEP, LoopPhase.FIRST_STEP, 7, True), (8, 7, LoopPhase.TRAINING, 7, True)]
    assert (page.read(1).step, page.read(1).phase) == (8, LoopPhase.DONE)


def test_stop_after_a_later_step_ends_there(page: HeartbeatPage) -> None:
    run = Run(attached(page), {})
    done = []
    for step in run.steps():
        page.stop_after(3)
        done.append(step)
    assert (done, run.stopping) == ([0, 1, 2, 3], True)


def test_stop_after_a_step_that_is_over_ends_at_the_next_boundary(page: HeartbeatPage) -> None:
    page.stop_after(3)
    run = Run(attached(page), {})
    assert list(run.steps(start=10)) == []
    assert run.stopping


def test_break_leaves_the_step_unfinished_and_the_loop_done(page: HeartbeatPage) -> None:
    run = Run(attached(page), {})
    for step in run.steps():
        if step == 1:
            break
    assert (page.read(1).step, page.read(1).phase, run.stopping) == (0, LoopPhase.DONE, False)


def test_nested_phases_restore_and_count_saves(page: HeartbeatPage) -> None:
    run = Run(attached(page), {})
    phases = []
    for _ in run.steps(stop=1):
        with run.phase("evaluation"):
            with run.phase("checkpoint"):
                phases.append(page.read(1).phase)
            phases.append(page.read(1).phase)
            with run.phase("something"):
                phases.append(page.read(1).phase)
        phases.append(page.read(1).phase)
    assert phases == [LoopPhase.CHECKPOINT, LoopPhase.EVALUATION, LoopPhase.OTHER, LoopPhase.FIRST_STEP]
    assert (page.read(1).saves, page.read(1).saves_step) == (1, NO_STEP)


def test_checkpoint_that_raises_is_no_save(page: HeartbeatPage) -> None:
    run = Run(attached(page), {})
    with pytest.raises(OSError, match="full"), run.phase("checkpoint"):
        raise OSError("full")
    assert page.read(1).saves == 0
    assert page.read(1).phase is LoopPhase.START_UP


def test_negative_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be negative"):
        next(Run(Heartbeat(), {}).steps(start=-1))


def test_outside_perdure_everything_works_and_nobody_reads() -> None:
    run = Run(Heartbeat(), {})
    assert list(run.steps(stop=3)) == [0, 1, 2]
    with run.phase("checkpoint"):
        pass
    assert (run.rank, run.world_size, run.generation, run.restarts, run.stopping) == (0, 1, 0, 0, False)


def test_detached_heartbeat_writes_no_more(page: HeartbeatPage) -> None:
    heartbeat = attached(page)
    heartbeat.step_done(1)
    heartbeat.detach()
    heartbeat.step_done(2)
    assert page.read(1).step == 1


class Optimizer:
    """Anything that can be referred to weakly."""


def test_counter_follows_the_first_optimizer_that_lives() -> None:
    current.detach()
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    counter(first, (), {})
    counter(second, (), {})
    counter(first, (), {})
    assert current.step == 2
    gone = weakref.ref(first)
    del first
    assert gone() is None
    counter(second, (), {})
    assert (current.step, current.phase) == (3, LoopPhase.TRAINING)


def test_counter_is_silent_once_the_script_tells() -> None:
    current.detach()
    current.tell_from(100)
    StepCounter()(Optimizer(), (), {})
    assert current.step == NO_STEP
    current.detach()
