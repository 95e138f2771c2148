"""Any sequence of records, legal or silly, is accounted without an error and adds up to the presence of the nodes."""

from collections.abc import Callable, Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.cli.story import FaultStory
from perdure.cli.why import explain
from perdure.goodput import Interval, Ledger, account
from perdure.goodput.phases import Phase, to_us
from perdure.ports import LogRecord
from perdure.vocab import event as e
from tests.unit.goodput.a_log import START, LogBuilder, incarnation, node_id

NODES = st.integers(0, 3)
SILENCE = st.sampled_from((0.0, 0.1, 0.5, 7.3, 1e6))


def presence_us(records: Iterable[LogRecord], now: float | None) -> int:
    """From joining to going, told from the log alone; a second opinion to `account`."""
    clock, total, since = 0, 0, dict[str, int]()
    for record in records:
        clock = max(clock, to_us(record.at))
        match record:
            case e.NodeJoined():
                since.setdefault(record.node.id, clock)
            case e.NodeLost() | e.NodeLeft():
                total += clock - since.pop(record.node, clock)
            case e.JobEnded():
                return total + sum(clock - begin for begin in since.values())
            case _:
                pass
    clock = max(clock, 0 if now is None else to_us(now))
    return total + sum(clock - begin for begin in since.values())


def check(ledger: Ledger, records: list[LogRecord], now: float | None) -> None:
    expected = presence_us(records, now)
    assert sum(to_us(i.end) - to_us(i.begin) for i in ledger.intervals) == expected
    assert sum(to_us(s) for s in ledger.by_phase.values()) == expected
    assert sum(to_us(s) for sums in ledger.by_node.values() for s in sums.values()) == expected
    assert to_us(ledger.node_seconds) == expected
    for a, b in zip(ledger.intervals, ledger.intervals[1:], strict=False):
        assert a.begin < a.end
        assert a.node != b.node or a.end <= b.begin
        assert a.node != b.node or a.end < b.begin or a.phase != b.phase or is_rejoin(b, records)
    for restart in ledger.restarts:
        assert min(restart.detection_s, restart.recovery_s, restart.held_s, restart.redone_s) >= 0.0
    assert 0.0 <= ledger.effective <= 1.0


def is_rejoin(interval: Interval, records: list[LogRecord]) -> bool:
    begin = to_us(interval.begin)
    clock, joins = 0, set()
    for record in records:
        clock = max(clock, to_us(record.at))
        if isinstance(record, e.NodeJoined):
            joins.add(clock)
    return begin in joins


@st.composite
def logs(draw: st.DrawFn) -> list[LogRecord]:
    """What control might write, and what it never would: any order, any node, times that jump back."""
    log = LogBuilder()
    if draw(st.booleans()):
        log.submitted()
    for _ in range(draw(st.integers(0, 40))):
        log.after(draw(st.sampled_from((0.0, 0.001, 0.3, 1.7, 60.0, -0.2, -100.0, 1 / 3))))
        happen = draw(st.sampled_from(ANY_TIME + WITH_MEMBERS if log.members else ANY_TIME))
        happen(draw, log)
    return log.records


Silly = Callable[[st.DrawFn, LogBuilder], object]


def some_nodes(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(NODES, min_size=1, unique=True))


def a_step(draw: st.DrawFn) -> int:
    return draw(st.integers(-1, 20))


def a_rank(draw: st.DrawFn, log: LogBuilder) -> int:
    return draw(st.integers(0, 2 * len(log.members) - 1))


def late_step(draw: st.DrawFn, log: LogBuilder) -> None:
    at, node = log.at - draw(SILENCE), node_id(draw(NODES))
    log.event(e.StepsBegun, at=at, node=node, generation=log.generation, step=a_step(draw))


ANY_TIME: list[Silly] = [
    lambda draw, log: log.joined(draw(NODES)),
    lambda draw, log: log.joined(draw(NODES)),
    lambda draw, log: log.lost(draw(NODES), draw(SILENCE)),
    lambda draw, log: log.event(e.NodeLeft, node=node_id(draw(NODES)), incarnation=incarnation(0)),
    lambda draw, log: log.begin(*some_nodes(draw)),
    lambda draw, log: log.began(*some_nodes(draw)),
    lambda draw, log: log.ended() if draw(st.integers(0, 9)) == 0 else None,
    lambda draw, log: log.finish() if draw(st.integers(0, 3)) == 0 else None,
    lambda draw, log: log.give_up("test") if draw(st.integers(0, 3)) == 0 else None,
    lambda draw, log: log.hold(),
]
WITH_MEMBERS: list[Silly] = [
    lambda draw, log: log.running(0.1, last_step=a_step(draw)),
    lambda draw, log: log.stepped(a_step(draw)),
    lambda draw, log: log.stepped(a_step(draw)),
    lambda draw, log: log.caught_up(a_step(draw), 0.4),
    lambda draw, log: log.exited(a_rank(draw, log), signal=9, step=a_step(draw)),
    lambda draw, log: log.stopped(a_rank(draw, log), draw(SILENCE)),
    lambda draw, log: log.stalled(a_rank(draw, log), draw(SILENCE), a_step(draw)),
    lambda draw, log: log.diagnosed("worker.signal", "it was killed", draw(NODES)),
    lambda draw, log: log.restart(),
    lambda draw, log: log.restart(),
    lambda draw, log: log.finished() if draw(st.integers(0, 3)) == 0 else None,
    lambda draw, log: log.event(e.StopRequested, by="test", signal=15, grace=1.0) if draw(st.booleans()) else None,
    late_step,
]


@given(logs(), st.one_of(st.none(), st.floats(START - 10, START + 1000)))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_account_any_log_adds_up_to_the_presence_of_the_nodes(records: list[LogRecord], now: float | None) -> None:
    check(account(records, now), records, now)


@given(logs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_account_shuffled_log_adds_up_too(records: list[LogRecord], random: Random) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)
    check(account(shuffled), shuffled, None)


@given(logs())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_account_every_prefix_of_a_log_adds_up(records: list[LogRecord]) -> None:
    for length in range(len(records)):
        check(account(records[:length]), records[:length], None)


@pytest.mark.soak
@pytest.mark.timeout(900)
@given(logs(), st.one_of(st.none(), st.floats(START - 10, START + 1000)))
@settings(max_examples=5_000, deadline=None)
def test_account_many_new_logs_add_up(records: list[LogRecord], now: float | None) -> None:
    check(account(records, now), records, now)
    assert explain(records)
    story = FaultStory()
    for record in records:
        story.tell(record)


def test_every_phase_is_in_the_ledger() -> None:
    assert set(account(()).by_phase) == set(Phase)
