"""A sampler whose position means the same in every world: after a resume on more or fewer ranks each sample of an
epoch is still used once. For `torch.utils.data.DataLoader(dataset, batch_size, sampler=…)`.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.positions import KEY, OwnPosition, Position, divide, left, next_epoch


class GlobalSampler:
    """This rank's share of one order that all ranks have. Each iteration gives what is left of the epoch, then ends;
    the next iteration is the next epoch.

    A DataLoader with workers asks for samples long before they are used: call `used(count)` after each step then, else
    a checkpoint would take them for used. Without workers that is not needed.
    """

    def __init__(self, length: int, rank: int, world_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        """`length`: of the dataset. Raises ConfigError for a rank that the world does not have."""
        if length < 0 or not 0 <= rank < world_size:
            raise ConfigError(f"a sampler of {length} samples for rank {rank} of {world_size} cannot be")
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._given = divide(Position(), rank, world_size)
        self._began = self._given
        self._used: OwnPosition | None = None

    @property
    def epoch(self) -> int:
        """Of the samples that are given next."""
        return self._given.began.epoch

    def __len__(self) -> int:
        """Samples that this rank is still to be given in this epoch."""
        rest = max(self._length - self._given.began.used, 0)
        return len(range(self._given.rank + self._given.taken * self._given.world_size, rest, self._given.world_size))

    def __iter__(self) -> Iterator[int]:
        if not len(self) and (self._given.taken or self._given.began.used):
            self._given = next_epoch(self._given)
        order = self._order(self._given.began.epoch)
        for place in left(self._given, self._length):
            self._given = self._given.advanced(1)
            yield order[place]

    def used(self, count: int) -> None:
        """`count` more samples of those that were given have been trained on."""
        position = self._used or self._began
        rest = sum(1 for _ in zip(range(count), left(position, self._length), strict=False))
        if rest < count:  # the first samples of the next epoch are among them
            position, count = next_epoch(position.advanced(rest)), count - rest
        self._used = position.advanced(count)

    def state_dict(self) -> dict[str, Any]:
        told = self._used or self._given
        return {KEY: msgspec.to_builtins(told), "length": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of this rank in this world, or as `positions.merge_states` gives it. Raises ConfigError for another order."""
        mine = {"length": self._length, "seed": self._seed, "shuffle": self._shuffle}
        if {key: state.get(key) for key in mine} != mine:
            raise ConfigError(f"the checkpoint's data order is another one: {dict(state)} instead of {mine}")
        told = msgspec.convert(state[KEY], OwnPosition)
        if (told.rank, told.world_size) != (self._given.rank, self._given.world_size):
            raise ConfigError(
                f"the data position is that of rank {told.rank} of {told.world_size}, this is rank {self._given.rank} "
                f"of {self._given.world_size}; merge the positions of all ranks first (positions.merge_states)"
            )
        self._given, self._began, self._used = told, told, None

    def _order(self, epoch: int) -> list[int] | range:
        if not self._shuffle:
            return range(self._length)
        order = list(range(self._length))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order
