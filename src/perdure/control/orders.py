"""The state, as each node must hear it. Pure."""

import msgspec

from perdure.control.state import GenerationState, State
from perdure.vocab.generation import Address, Phase
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant
from perdure.wire.messages import DrainOrder, Duty, Orders, Peer


def orders_for(state: State, node: NodeId, now: Instant) -> Orders:
    """What `node` is to do now."""
    assert state.spec is not None
    spec, generation = state.spec, state.generation
    common = Orders(
        version=state.version,
        job=spec.id,
        duty=Duty.WAIT,
        attempt=int(state.began_at),
        rules=spec.rules,
        stalls=spec.stalls,
    )
    if state.ended is not None:
        return msgspec.structs.replace(
            common, duty=Duty.STOP, exit_code=state.ended.exit_code, generation=state.number, at_once=_is_hasty(state)
        )
    if state.ending is not None:
        # No worker may live any more; the agent stays, and with it the memory server that has the checkpoint.
        return msgspec.structs.replace(common, spare=True, generation=state.number)
    if generation is not None and node in state.uncleared:
        return msgspec.structs.replace(
            common,
            duty=Duty.GATHER,
            generation=generation.number,
            assignment=generation.assignment,
            peers=_peers(state, node),
        )
    if generation is None or not _has_part(state, generation, node):
        return msgspec.structs.replace(common, spare=True, generation=state.number, peers=_peers(state, node))
    running = generation.phase in (Phase.AGREED, Phase.RUNNING)
    return msgspec.structs.replace(
        common,
        duty=Duty.RUN if running else Duty.GATHER,
        generation=generation.number,
        assignment=generation.assignment,
        store=generation.store if running else None,
        restarts=generation.number - 1,
        redo_until=generation.redo_until,
        drain=_drain(state, now),
        peers=_peers(state, node),
    )


def basis(state: State) -> tuple[object, ...]:
    """What orders are made from: while it is equal, nobody's orders have changed.

    With many nodes it is far cheaper to compare this once than to make everyone's orders after every event.
    """
    generation = state.generation
    part = None if generation is None else (generation.phase, generation.store, generation.gone)
    order = state.draining.order if state.draining is not None else None
    nodes: tuple[object, ...] = ()
    if state.previous is not None:
        nodes = (state.spares(), state.fit, tuple(k.node for k in state.nodes.values()))
    return state.ended, state.ending, state.number, part, order, nodes, state.uncleared


def meaning(orders: Orders) -> Orders:
    """`orders` without what changes although nothing has to be done differently."""
    drain = None if orders.drain is None else msgspec.structs.replace(orders.drain, grace=0.0)
    return msgspec.structs.replace(orders, version=0, drain=drain, redo_until=None)


def _is_hasty(state: State) -> bool:
    return state.draining is not None and state.draining.request.grace <= 0


def _has_part(state: State, generation: GenerationState, node: NodeId) -> bool:
    known = state.nodes.get(node)
    is_member = generation.assignment.member(node) is not None and node not in generation.gone
    return is_member and known is not None and known.is_fit


def _drain(state: State, now: Instant) -> DrainOrder | None:
    order = state.draining.order if state.draining is not None else None
    if order is None:
        return None
    return DrainOrder(
        signal=order.signal, grace=max(0.0, order.until - now), stop_after=order.stop_after, forward=order.forward
    )


def _peers(state: State, node: NodeId) -> tuple[Peer, ...]:
    """Whom `node` asks when it does not reach control: all that could replace it have a say, so the spares too."""
    if state.previous is None:
        return ()
    others = dict.fromkeys((*state.previous.nodes, *state.spares()))
    known = (state.nodes.get(other) for other in others if other != node)
    return tuple(
        Peer(node=k.node.id, address=Address(k.node.address, k.node.peer_port)) for k in known if k is not None
    )
