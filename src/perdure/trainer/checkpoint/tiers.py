"""All sources of one checkpoint together, the best first: what one cannot give, or gives wrongly, the next one may.

Every source has the very same checkpoint (attempt, generation, step), so that mixing them mixes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import ConfigError, CorruptCheckpointError
from perdure.trainer.checkpoint.catalogue import Catalogue
from perdure.trainer.checkpoint.sources import BAD_SOURCE, BorrowedSlots, Lender, NodeSlots, SlotSource, Span, reason_of
from perdure.trainer.checkpoint.stored import ANY_RANK, StoredSlots
from perdure.trainer.checkpoint.tail import Tail, decode_tail, tied_in
from perdure.vocab.checkpoint import TensorPart
from perdure.wire.memory import RestorePlan

Holder = tuple[SlotSource, int, TensorPart]


class Tiers:
    """The sources that a RestorePlan names, and what is known of them so far."""

    def __init__(self, plan: RestorePlan, lender: Lender | None, store: str, *, rank: int, world_size: int) -> None:
        """`rank` and `world_size`: of the world that reads."""
        chosen = plan.chosen
        if chosen.checkpoint is None:
            raise ConfigError("the plan names no checkpoint")
        self.checkpoint = chosen.checkpoint
        self.catalogue = Catalogue()
        self._rank = rank
        self._is_same_world = world_size == chosen.world_size and rank not in chosen.missing
        self._writers = chosen.world_size
        self._memory: list[SlotSource] = [NodeSlots(chosen.checkpoint, plan.here)]
        held = {writer for writer, nodes in chosen.holders.items() if nodes}
        away = sorted(held.union(*(group.rebuildable(held) for group in chosen.groups)))
        if lender is not None and away:
            self._memory.append(BorrowedSlots(chosen.checkpoint, away, lender))
        self._stored = StoredSlots(store, chosen.stored) if chosen.stored is not None and store else None
        self._known: set[tuple[int, int]] = set()
        self._knows_storage = False
        self._reasons: dict[str, None] = {}
        self._tails: dict[int, Tail] = {}
        self._shared: Mapping[str, Any] | None = None

    # --- what there is -----------------------------------------------------------------------------------------------

    def learn(self) -> Iterator[None]:
        """Add layouts to the catalogue, and stop after each stage, for the caller may know enough by then.

        In the same world a rank's own slot is enough. In another one all are read, those of this node first: only so
        is it known which names there are.
        """
        if self._is_same_world:
            self._learn(self._rank, self._memory)
            yield
        for writer in self._rotated(self._memory[0].ranks()):
            self._learn(writer, self._memory[:1])
        for writer in self._rotated({rank for source in self._memory for rank in source.ranks()}):
            self._learn(writer, self._memory)
        yield
        self._learn_storage()
        yield

    def know_all(self) -> None:
        """Everything that memory has; what storage has where memory has not all ranks.

        Raises CorruptCheckpointError, saying what was tried, where there is nothing at all.
        """
        for writer in self._rotated({rank for source in self._memory for rank in source.ranks()}):
            self._learn(writer, self._memory)
        if len(self.catalogue.names) < self._writers:
            self._learn_storage()
        if not self.catalogue.names:
            raise CorruptCheckpointError(f"nothing of {self.checkpoint} can be read: {self._said()}")
        self.catalogue.check_boxes()

    def holders(self, part: TensorPart) -> Sequence[Holder]:
        """Of this shard, as far as they are known, the best first."""
        return self.catalogue.holders[*part.key, part.shape]

    def _rotated(self, ranks: Iterable[int]) -> list[int]:
        """Beginning with this rank, so that not all readers of a replicated model ask the same writer."""
        in_order = sorted(ranks)
        return [rank for rank in in_order if rank >= self._rank] + [rank for rank in in_order if rank < self._rank]

    def _learn(self, writer: int, sources: Sequence[SlotSource]) -> None:
        """Take the layout of `writer` from the first source that can give it; the others hold the same slot."""
        for source in sources:
            if writer not in source.ranks() or (id(source), writer) in self._known:
                continue
            self._known.add((id(source), writer))
            try:
                self.catalogue.add(source, writer, source.layout(writer))
            except BAD_SOURCE as exc:
                self._reasons[reason_of(source, writer, exc)] = None
            else:
                return

    def _learn_storage(self) -> None:
        if self._stored is None or self._knows_storage:
            return
        self._knows_storage = True
        try:
            self.catalogue.add(self._stored, ANY_RANK, self._stored.layout(ANY_RANK))
        except BAD_SOURCE as exc:
            self._reasons[reason_of(self._stored, ANY_RANK, exc)] = None

    def learn_tied(self) -> None:
        """Other names of tensors that are kept once; they are in the tails."""
        for writer in [self._rank] if self._is_same_world else range(self._writers):
            try:
                self.catalogue.tie(tied_in(self._tail(writer).shared))
            except CorruptCheckpointError:
                continue  # replicas have the same names

    # --- reading -----------------------------------------------------------------------------------------------------

    def wanted(self, spans: Iterable[Span]) -> list[tuple[SlotSource, int, list[Span]]]:
        """What each source will be asked for, should all be good."""
        found: dict[tuple[int, int], tuple[SlotSource, int, list[Span]]] = {}
        for part, first, count in spans:
            source, rank, there = self.holders(part)[0]
            found.setdefault((id(source), rank), (source, rank, []))[2].append((there, first, count))
        return list(found.values())

    def read(self, part: TensorPart, first_byte: int, count: int) -> tuple[str, memoryview]:
        """(kind of the source, verified bytes) of this shard, from the first good one of all its holders."""
        reasons: dict[str, None] = {}
        for source, rank, there in self._all_holders(part):
            try:
                return source.kind, source.read(rank, there, first_byte, count)
            except BAD_SOURCE as exc:
                reasons[reason_of(source, rank, exc)] = None
        tried = "; ".join((*reasons, *self._reasons))
        raise CorruptCheckpointError(f"no good copy of {part.name!r} at {part.offsets} of {self.checkpoint}: {tried}")

    def confirm(self) -> None:
        for source in self._memory:
            source.confirm()

    def close(self) -> None:
        for source in self._memory:
            source.close()

    def _all_holders(self, part: TensorPart) -> Iterator[Holder]:
        """Those that are known; then, as they were not enough, those that have not been looked at."""
        seen: set[tuple[int, int]] = set()
        for learn_more in (None, self._look_everywhere, self._learn_storage):
            if learn_more is not None:
                learn_more()
            for source, rank, there in tuple(self.holders(part)):
                if (id(source), rank) not in seen:
                    seen.add((id(source), rank))
                    yield source, rank, there

    def _look_everywhere(self) -> None:
        for source in self._memory:
            for writer in self._rotated(source.ranks()):
                self._learn(writer, [source])

    # --- what is no tensor -------------------------------------------------------------------------------------------

    def shared(self) -> Mapping[str, Any]:
        """Values that are equal on all ranks, from the first tail that can be read. Raises CorruptCheckpointError."""
        for writer in self._rotated(range(self._writers)) if self._shared is None else ():
            try:
                self._shared = self._tail(writer).shared
                break
            except CorruptCheckpointError:
                continue
        if self._shared is not None:
            return self._shared
        raise CorruptCheckpointError(f"no tail of {self.checkpoint} can be read: {self._said()}")

    def own_values(self) -> tuple[Mapping[str, Any] | None, Mapping[int, Mapping[str, Any]]]:
        """(this rank's own or None, all that are of use): in another world those of all ranks that can be read."""
        owns: dict[int, Mapping[str, Any]] = {}
        for writer in [self._rank] if self._is_same_world else range(self._writers):
            try:
                owns[writer] = self._tail(writer).own
            except CorruptCheckpointError:
                continue  # it is lost; who needs it sees that it is not there
        return (owns.get(self._rank) if self._is_same_world else None), owns

    def _tail(self, writer: int) -> Tail:
        if writer in self._tails:
            return self._tails[writer]
        sources = [source for source in self._memory if writer in source.ranks()]
        for source in (*sources, *([self._stored] if self._stored is not None else [])):
            try:
                self._tails[writer] = decode_tail(source.tail(writer))
            except BAD_SOURCE as exc:
                self._reasons[reason_of(source, writer, exc)] = None
            else:
                return self._tails[writer]
        raise CorruptCheckpointError(f"the tail of rank {writer} cannot be read")

    @property
    def tried(self) -> str:
        """What could not be read so far, and why; empty: all could."""
        return "; ".join(self._reasons)

    def _said(self) -> str:
        return self.tried or "no node's memory and no storage has it"
