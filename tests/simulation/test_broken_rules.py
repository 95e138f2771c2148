"""The checks can fail: control or an agent that breaks one rule is caught by some seed."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from perdure.agent.decide import act
from perdure.agent.state import AgentAction, AgentState
from perdure.control.brain import step
from perdure.control.state import State
from perdure.ports import LogRecord
from perdure.sim.run import simulate
from perdure.sim.scenario import a_small_one
from perdure.vocab.decision import Decision
from perdure.vocab.event import AnyEvent, NodeGathered, NodeLost, WorkerExited
from perdure.vocab.ids import EventId, GenerationNumber
from perdure.vocab.units import Instant
from tests.simulation.seeds import catalogue

Stepped = tuple[State, tuple[LogRecord, ...]]
replace: Callable[..., Any] = msgspec.structs.replace


def answers_earlier_generations(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    """Takes what an earlier generation still says for news of this one."""
    said = {event.id: event for event in events}
    renewed = tuple(replace(e, generation=state.number) if isinstance(e, WorkerExited) else e for e in events)
    after, records = step(state, renewed, now, catalogue())
    return after, tuple(r if isinstance(r, Decision) else said.get(r.id, r) for r in records)


def forgets_what_it_acknowledged(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    """Takes a message that comes twice for two."""
    nodes = {node: replace(known, acked=0) for node, known in state.nodes.items()}
    return step(replace(state, nodes=nodes), events, now, catalogue())


def has_no_budget(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    after, records = step(replace(state, restarts=()), events, now, catalogue())
    return replace(after, restarts=(*state.restarts, *after.restarts)[-64:]), records


def does_not_wait_for_all_to_gather(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    """Takes the first node that has gathered for all of them."""
    invented: list[AnyEvent] = []
    for event in events:
        if isinstance(event, NodeGathered) and event.store and state.generation is not None:
            invented.extend(
                replace(event, id=EventId(f"invented/{node}/{state.version}"), node=node)
                for node in state.generation.assignment.nodes
            )
    return step(state, (*events, *invented), now, catalogue())


def does_not_wait_for_those_it_left_out(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    return step(replace(state, uncleared=frozenset()), events, now, catalogue())


def does_not_hear_of_lost_nodes(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    return step(state, tuple(e for e in events if not isinstance(e, NodeLost)), now, catalogue())


def counts_generations_from_one(state: State, events: tuple[AnyEvent, ...], now: Instant) -> Stepped:
    """Gives every generation the number that the one before had."""
    before = GenerationNumber(max(0, state.number - 1)) if state.number > 1 else state.number
    return step(replace(state, number=before), events, now, catalogue())


BROKEN_BRAINS = (
    answers_earlier_generations,
    forgets_what_it_acknowledged,
    has_no_budget,
    does_not_wait_for_all_to_gather,
    does_not_wait_for_those_it_left_out,
    does_not_hear_of_lost_nodes,
    counts_generations_from_one,
)


@pytest.mark.parametrize("brain", BROKEN_BRAINS, ids=lambda brain: brain.__name__)
def test_a_control_that_breaks_a_rule_is_caught(brain: Any) -> None:
    assert any(simulate(a_small_one(seed), seed, catalogue(), brain=brain).violations for seed in range(200))


def never_ends_its_own_workers(state: AgentState, now: Instant) -> tuple[AgentState, tuple[AgentAction, ...]]:
    """Takes silence for an answer, so its lease never ends."""
    return act(replace(state, contact=now), now)


@pytest.mark.parametrize("agent", [never_ends_its_own_workers], ids=lambda agent: agent.__name__)
def test_an_agent_that_breaks_a_rule_is_caught(agent: Any) -> None:
    assert any(simulate(a_small_one(seed), seed, catalogue(), agent=agent).violations for seed in range(1000))
