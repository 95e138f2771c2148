"""One rank's part of a stored checkpoint, written from its sealed slot; and the end, when all parts are there."""

from collections.abc import Callable

from perdure.errors import ConfigError, CorruptCheckpointError, HostError
from perdure.store.address import open_medium
from perdure.store.checkpoints import digest_of, write_whole
from perdure.store.manifest import (
    COMMIT,
    FINISHED,
    METADATA,
    Finished,
    Part,
    check_parts,
    is_plain_name,
    parse_name,
    part_name,
    seal,
    tail_name,
)
from perdure.store.medium import Medium
from perdure.store.reading import part_in
from perdure.store.sink import Pace
from perdure.trainer.checkpoint.distcp import encode_metadata, group_of, metadata_of, share_of, write_data
from perdure.trainer.checkpoint.sources import SealedSlot
from perdure.trainer.checkpoint.tail import decode_tail, tied_in
from perdure.vocab.ids import Rank
from perdure.vocab.units import Bytes
from perdure.wire.memory import DrainRequest


def write(request: DrainRequest, rank: int, on_bytes: Callable[[Bytes], None] | None = None) -> int:
    """Write the part of `rank`, or find that it is there already; gives its bytes. `on_bytes` hears how it gets on.

    Raises CorruptCheckpointError where the slot is not what was sealed, HostError or OSError where the store refuses.
    """
    medium = _open(request)
    if not 0 <= rank < len(request.by_rank):
        raise ConfigError(f"there is no rank {rank} in a world of {len(request.by_rank)}")
    slot = SealedSlot(request.slots[rank], request.checkpoint, rank)
    try:
        if slot.header.shards != request.by_rank[rank]:
            raise CorruptCheckpointError(f"{slot.path} holds other shards than rank {rank} had")
        group = group_of(rank, request.by_rank, _ranks(request))
        part = _written(medium, request.name, rank, slot.header.root, group)
        if part is None:
            if _is_committed(medium, request.name):
                raise HostError(f"{request.name} is in {request.store} already, with other bytes; drop one of the two")
            part = _write(medium, slot, group, request, Pace(request.bytes_per_second, on_bytes))
    finally:
        slot.close()
    return sum(record.nbytes for record in part.files)


def _write(medium: Medium, slot: SealedSlot, group: tuple[Rank, ...], request: DrainRequest, pace: Pace) -> Part:
    rank = slot.header.rank
    layout, tail = slot.layout(), slot.tail()
    tensors = [(part, slot.read(part, 0, part.nbytes)) for part in share_of(rank, layout.parts, group)]
    shared = decode_tail(tail).shared
    values = shared if rank == min(_ranks(request)) else {}
    names = {part.name for part in layout.parts}
    values = {name: value for name, value in values.items() if name not in names}
    medium.make(f"{request.name}/parts")
    files, pieces, singles = write_data(medium, request.name, rank, tensors, values, pace)
    kept = write_whole(medium, f"{request.name}/{tail_name(rank)}", tail, pace)
    slot.confirm()  # a slot that was given away while we read it has been torn: its part must not exist
    part = Part(
        rank=rank,
        world_size=len(request.by_rank),
        checkpoint=request.checkpoint,
        layout=slot.header.layout,
        shards=slot.header.shards,
        root=slot.header.root,
        group=group,
        files=(*files, kept),
        tensors=pieces,
        values=singles,
        tied=tied_in(shared),
    )
    write_whole(medium, f"{request.name}/{part_name(rank)}", seal(part))
    return part


def _written(medium: Medium, name: str, rank: int, root: str, group: tuple[Rank, ...]) -> Part | None:
    """The part, if an earlier drain has written it from a slot with the same bytes."""
    try:
        part = part_in(medium, name, rank)
    except CorruptCheckpointError:
        return None
    there = medium.files(name)
    whole = all(record.name in there and there[record.name].nbytes == record.nbytes for record in part.files)
    return part if whole and part.root == root and part.group == group else None


def finish(request: DrainRequest) -> None:
    """Write torch's `.metadata` and `parts/finish.json`. Raises CorruptCheckpointError where a part is missing."""
    medium = _open(request)
    if _is_committed(medium, request.name):
        return
    parts = [part_in(medium, request.name, rank) for rank in _ranks(request)]
    check_parts(parts, request.checkpoint, request.by_rank)
    metadata = metadata_of(parts, request.name.removesuffix(".tmp"))
    record = write_whole(medium, f"{request.name}/{METADATA}", encode_metadata(metadata))
    done = Finished(checkpoint=request.checkpoint, parts=digest_of(parts), metadata=record)
    write_whole(medium, f"{request.name}/{FINISHED}", seal(done))


def _is_committed(medium: Medium, name: str) -> bool:
    """Where nothing is renamed, what counts has the name of what is being written, and must not be touched."""
    return not medium.can_rename and COMMIT in medium.files(name)


def _open(request: DrainRequest) -> Medium:
    if not is_plain_name(request.name) or parse_name(request.name) != request.checkpoint:
        raise ConfigError(f"{request.name[:80]!r} is no name for {request.checkpoint}")
    medium = open_medium(request.store)
    if medium.can_rename != request.name.endswith(".tmp"):
        raise ConfigError(f"{request.name} is no name of an uncommitted checkpoint in {request.store}")
    return medium


def _ranks(request: DrainRequest) -> tuple[int, ...]:
    return tuple(sorted(request.ranks)) or tuple(range(len(request.by_rank)))
