"""Where a run is in its data, and what that means in another world: each sample of an epoch is used once.

Pure. An epoch is a sequence of places 0 … length-1, whose order (a shuffle from seed and epoch) is the same in every
world. The ranks deal what is left of it among themselves; what they have taken is put together again at a restore.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perdure.errors import ConfigError

KEY = "perdure_position"
"""Under it a sampler's or loader's state tells an `OwnPosition`, as `msgspec.to_builtins` gives it."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far all ranks together are: every place before `consumed` is used, and those in `beyond`."""

    epoch: int = 0
    consumed: int = 0
    beyond: tuple[int, ...] = ()
    """Ascending, all greater than `consumed`: ranks were not equally far."""

    @property
    def used(self) -> int:
        """Places of this epoch that have been used."""
        return self.consumed + len(self.beyond)


class OwnPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank is: since `began`, which all ranks of its world have in common, it has taken `taken`."""

    began: Position
    rank: int
    world_size: int
    taken: int = 0

    def advanced(self, count: int) -> "OwnPosition":
        return msgspec.structs.replace(self, taken=self.taken + count)


def place_at(began: Position, number: int) -> int:
    """The place that is number `number` of what is left after `began`."""
    place = began.consumed + number
    for used in began.beyond:
        if used > place:
            break
        place += 1
    return place


def left(own: OwnPosition, length: int) -> Iterator[int]:
    """Places that this rank still has to take in an epoch of `length`, in order. Ranks differ by one at most."""
    count = max(length - own.began.used, 0)
    for number in range(own.rank + own.taken * own.world_size, count, own.world_size):
        yield place_at(own.began, number)


def next_epoch(own: OwnPosition) -> OwnPosition:
    """At the beginning of the epoch after."""
    return OwnPosition(began=Position(epoch=own.began.epoch + 1), rank=own.rank, world_size=own.world_size)


def merge(owns: Iterable[OwnPosition], length: int | None = None) -> Position:
    """Where all ranks together are.

    `length`: places in an epoch; needed only where some ranks have begun the next epoch and others have not: those
    must have finished theirs. Raises ConfigError where a rank is missing, or where they do not fit together.
    """
    ranks = sorted(owns, key=lambda own: own.rank)
    if not ranks or [own.rank for own in ranks] != list(range(ranks[0].world_size)):
        present = ", ".join(str(own.rank) for own in ranks) or "none"
        raise ConfigError(f"the data position of some ranks is lost (there are those of: {present}); give a merge hook")
    newest = max(own.began.epoch for own in ranks)
    if any(own.began.epoch < newest for own in ranks):
        ranks = [_caught_up(own, newest, length) for own in ranks]
    if len({(own.began, own.world_size) for own in ranks}) != 1:
        raise ConfigError("the ranks' data positions began at different places; give a merge hook")
    return _together(ranks)


def divide(position: Position, rank: int, world_size: int) -> OwnPosition:
    """This rank's share of what is left, in a world of any size."""
    return OwnPosition(began=position, rank=rank, world_size=world_size)


def _together(ranks: Sequence[OwnPosition]) -> Position:
    began, size = ranks[0].began, len(ranks)
    whole = min(own.taken for own in ranks)  # so many rounds are complete
    numbers = sorted(own.rank + turn * size for own in ranks for turn in range(whole, own.taken))
    first = whole * size  # then as long as nothing is left out
    while numbers and numbers[0] == first:
        first += 1
        numbers.pop(0)
    places = [place_at(began, number) for number in numbers]
    consumed = place_at(began, first)
    beyond = sorted({*places, *(place for place in began.beyond if place > consumed)})
    return Position(epoch=began.epoch, consumed=consumed, beyond=tuple(beyond))


def _caught_up(own: OwnPosition, epoch: int, length: int | None) -> OwnPosition:
    if own.began.epoch == epoch:
        return own
    if length is None or own.began.epoch != epoch - 1 or next(left(own, length), None) is not None:
        raise ConfigError(
            f"rank {own.rank} is in epoch {own.began.epoch} while others are in {epoch}; save between two epochs, or "
            "give a merge hook"
        )
    return next_epoch(own)


# --- states of loaders -----------------------------------------------------------------------------------------------

Merge = Callable[[Mapping[int, Any], int, int], Any]
"""(state by the rank that saved it, this rank, world size now) → state for this rank."""


def merge_states(states: Mapping[int, Any], rank: int, world_size: int, hook: Merge | None = None) -> Any:
    """A loader's or sampler's state for this rank, from those of another world.

    `hook` decides where there is one. Else a state that tells an `OwnPosition` under KEY is merged exactly, everything
    else in it must be equal on all ranks. Raises ConfigError where neither helps: a state may not be guessed.
    """
    if hook is not None:
        return hook(states, rank, world_size)
    if not states or not all(isinstance(state, Mapping) and KEY in state for state in states.values()):
        raise ConfigError(
            "the data loader's state does not tell its position in the whole, and the number of ranks has changed: "
            "give checkpoint(merge=…), or a sampler that does (perdure.trainer.checkpoint.positions)"
        )
    rests = [{key: value for key, value in state.items() if key != KEY} for state in states.values()]
    if any(rest != rests[0] for rest in rests):
        raise ConfigError("the ranks' data loaders disagree on more than their position; give a merge hook")
    position = merge([_decoded(state[KEY]) for state in states.values()], rests[0].get("length"))
    return {**rests[0], KEY: msgspec.to_builtins(divide(position, rank, world_size))}


def _decoded(value: object) -> OwnPosition:
    try:
        return msgspec.convert(value, OwnPosition)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"a data position in the checkpoint cannot be read: {exc}") from exc
