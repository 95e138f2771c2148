"""A chosen checkpoint back into the very tensors: straight from this node's slot where it fits, else by the reader.

Knows the plan that all ranks were given; does not choose. What a damaged slot has put into a tensor is overwritten from
the next source; where there is none, the restore raises.
"""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from perdure.errors import ConfigError, CorruptCheckpointError
from perdure.trainer.checkpoint import positions, randomness
from perdure.trainer.checkpoint.copy import Copiers, out_of, part_of
from perdure.trainer.checkpoint.layout import Bound, bind
from perdure.trainer.checkpoint.sources import Lender, Mapped, SealedSlot
from perdure.trainer.checkpoint.state import State
from perdure.trainer.checkpoint.tail import decode_tail, tied_in
from perdure.vocab.checkpoint import CheckpointId, Layout
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.memory import RestorePlan


class World(msgspec.Struct, frozen=True):
    """Who reads."""

    rank: int
    size: int
    store: str


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore has done."""

    checkpoint: CheckpointId
    nbytes: Bytes
    """Of tensors that were filled on this rank."""
    sources: Mapping[str, Bytes]
    """The same by where they came from."""
    seconds: Seconds
    missing: tuple[str, ...] = ()
    """Not strict: names that the checkpoint did not have."""
    extra: tuple[str, ...] = ()


def fill(
    state: State,
    plan: RestorePlan,
    lender: Lender,
    world: World,
    copiers: Copiers,
    *,
    strict: bool = True,
    merge: positions.Merge | None = None,
    mapped: Mapped | None = None,
    known: Bound | None = None,
) -> Restored:
    """`mapped` and `known` spare time: memory of slots that is faulted in, and the layout that was saved last.

    Raises ConfigError where the checkpoint does not fit, CorruptCheckpointError where no good copy is left."""
    checkpoint = plan.chosen.checkpoint
    if checkpoint is None:
        raise ConfigError("the plan names no checkpoint")
    begin = time.perf_counter()
    found = _straight(state, plan, world, copiers, mapped, known)
    if found is None:
        found = _by_reader(state, plan, lender, world, strict=strict, merge=merge)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - begin)


def _straight(
    state: State, plan: RestorePlan, world: World, copiers: Copiers, mapped: Mapped | None, known: Bound | None
) -> Restored | None:
    """From this rank's own slot in this node's memory; None where it is not here, does not fit, or is damaged."""
    checkpoint, path = plan.chosen.checkpoint, plan.here.get(world.rank)
    if checkpoint is None or path is None or plan.chosen.world_size != world.size:
        return None
    try:
        slot = SealedSlot(path, checkpoint, world.rank, mapped)
    except CorruptCheckpointError:
        return None  # the reader tries again, and then goes to the next source
    try:
        return _from_slot(state, slot, checkpoint, world, copiers, known)
    except CorruptCheckpointError:
        return None
    finally:
        slot.close()


def _from_slot(
    state: State, slot: SealedSlot, checkpoint: CheckpointId, world: World, copiers: Copiers, known: Bound | None
) -> Restored | None:
    layout = known.layout if known is not None and known.hash == slot.header.layout else slot.layout()
    tail = decode_tail(slot.tail())
    targets = state.targets({part.name: (part.whole, part.dtype) for part in layout.parts}, tied_in(tail.shared))
    bound = bind(targets, world.rank, world.size, known)
    if bound.hash != slot.header.layout and not _fits(bound, layout):
        return None
    starts = {part.key: part.start for part in layout.parts}
    flat = [(starts[key], address, count) for key, (_, address, count) in _with_keys(bound)]
    rest = [(msgspec.structs.replace(part, start=starts[part.key]), tensor) for part, tensor in bound.rest]
    slot.confirm()
    with torch.no_grad():
        chunks, digests = slot.chunks_with(layout.data_bytes)
        bad = out_of(chunks, digests, flat, copiers)
        if bad:
            raise CorruptCheckpointError(f"{slot.path}: chunk {bad[0]} is not what was sealed")
        for part, tensor in rest:
            tensor.copy_(part_of(chunks, part))
        slot.confirm()
        state.put(tail.shared, tail.own)
    nbytes = sum(part.nbytes for part in layout.parts)
    return Restored(checkpoint=checkpoint, nbytes=nbytes, sources={"own memory": nbytes}, seconds=0.0)


def _with_keys(bound: Bound) -> list[tuple[tuple[str, tuple[int, ...]], tuple[int, int, int]]]:
    by_start = {part.start: part.key for part in bound.layout.parts if part.nbytes}
    return [(by_start[move[0]], move) for move in bound.flat]


def _fits(bound: Bound, layout: Layout) -> bool:
    """Whether the slot has exactly these pieces, wherever they lie in it."""

    def pieces(of: Layout) -> list[tuple[Any, ...]]:
        return sorted((part.name, part.offsets, part.shape, part.whole, part.dtype) for part in of.parts)

    return pieces(bound.layout) == pieces(layout)


# --- any other source, any other world -------------------------------------------------------------------------------


def _by_reader(
    state: State, plan: RestorePlan, lender: Lender, world: World, *, strict: bool, merge: positions.Merge | None
) -> Restored:
    from perdure.trainer.checkpoint.reader import load

    checkpoint = plan.chosen.checkpoint
    assert checkpoint is not None
    targets = state.targets(*_wholes(state, plan, lender, world))
    found = load(plan, lender, targets, rank=world.rank, world_size=world.size, store=world.store, strict=strict)
    if found.own is not None:
        state.put(found.shared, found.own, strict=strict)
    else:
        state.put(found.shared, None, strict=strict)
        _of_another_world(state, found.owns, checkpoint, world, merge)
    return Restored(
        checkpoint=checkpoint,
        nbytes=found.nbytes,
        sources=found.sources,
        seconds=0.0,
        missing=found.missing,
        extra=found.extra,
    )


def _wholes(
    state: State, plan: RestorePlan, lender: Lender, world: World
) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, str]]:
    """Names, shapes and dtypes in the checkpoint, from as few layouts as tell of all tensors here; and tied ones."""
    from perdure.trainer.checkpoint.tiers import Tiers

    here = set(state.gather().tensors)
    tiers = Tiers(plan, lender, world.store, rank=world.rank, world_size=world.size)
    try:
        for _ in tiers.learn():
            if here and here <= set(tiers.catalogue.wholes):
                break
        wholes = dict(tiers.catalogue.wholes)
        tiers.learn_tied()
        return wholes, tiers.catalogue.tied
    finally:
        tiers.close()


def _of_another_world(
    state: State,
    owns: Mapping[int, Mapping[str, Any]],
    checkpoint: CheckpointId,
    world: World,
    merge: positions.Merge | None,
) -> None:
    """Random numbers are derived, the same in every such restore; positions in the data are put together."""
    seeds = [own["seed"] for _, own in sorted(owns.items())]
    for name, loader in state.loaders().items():
        states = {rank: own["state"][name] for rank, own in owns.items() if name in own.get("state", {})}
        loader.load_state_dict(positions.merge_states(states, world.rank, world.size, merge))
    randomness.derive(seeds[0] if seeds else torch.initial_seed(), checkpoint.step, world.rank)
