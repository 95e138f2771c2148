"""How a trainer gets its slots: what it says of its layout is checked, what fits is kept, what is missing is made."""

import os

import anyio.to_thread
import msgspec

from perdure.agent.memory import ring as facts
from perdure.agent.memory.files import SlotFile
from perdure.agent.memory.parity import NAME
from perdure.agent.memory.ring import Line
from perdure.agent.memory.room import REPLICA_FILES, Need, check_room, explain, room_in
from perdure.agent.memory.tier import Seat, Tier
from perdure.errors import ConfigError, CorruptCheckpointError, HostError
from perdure.vocab.checkpoint import Layout, SlotState
from perdure.vocab.units import Bytes
from perdure.wire.digest import layout_hash, shards_hash
from perdure.wire.memory import Attach, Attachment
from perdure.wire.parity import FILES, parity_bytes
from perdure.wire.slotfile import decode_layout
from perdure.wire.slots import TAIL_LIMIT, SlotHeader

LAYOUT_LIMIT: Bytes = 256 << 20
"""A million parts; whoever sends more is not one of our trainers."""
MOST_SLOTS = 16
_LONGEST = 1 << 46
"""Bytes of one slot: more than any machine has, and far from what overflows."""


def read_layout(attach: Attach, fd: int) -> tuple[Layout, bytes]:
    """The layout in a trainer's descriptor, and its text. Blocking. Raises ConfigError where it is not what it says."""
    try:
        size = os.fstat(fd).st_size
        if size > LAYOUT_LIMIT:
            raise ConfigError(f"the layout of rank {attach.rank} has {size} bytes, which is no layout")
        text = os.pread(fd, size, 0)
        layout = decode_layout(text)
    except (CorruptCheckpointError, OSError) as exc:
        raise ConfigError(f"the layout of rank {attach.rank} cannot be read: {exc}") from exc
    if (layout_hash(layout), shards_hash(layout)) != (attach.layout, attach.shards):
        raise ConfigError(f"the layout of rank {attach.rank} is not the one that it has told the hash of")
    end = 0
    for part in layout.parts:
        if part.start < end or part.start % 64:
            raise ConfigError(f"{part.name} of rank {attach.rank} overlaps another one, or is not aligned")
        end = part.start + part.nbytes
    if not end <= layout.data_bytes <= _LONGEST or attach.tail_room > TAIL_LIMIT:
        raise ConfigError(f"the layout of rank {attach.rank} does not fit into {layout.data_bytes} bytes")
    return layout, text


def blank(attach: Attach, layout: Layout, text: bytes) -> SlotHeader:
    """Header of a new slot; written with sequence number 0."""
    return SlotHeader(
        sequence=-1,
        job=attach.job,
        rank=attach.rank,
        world_size=attach.world_size,
        state=SlotState.FREE,
        layout=attach.layout,
        shards=attach.shards,
        data_bytes=layout.data_bytes,
        tail_room=attach.tail_room,
        layout_bytes=len(text),
    )


def slots_of(attach: Attach) -> int:
    """How many a rank has: one to fall back to, one to write, and one that is drained."""
    return min(attach.policy.slots or (3 if attach.store else 2), MOST_SLOTS)


async def give_slots(tier: Tier, attach: Attach, layout: Layout, text: bytes) -> Seat:
    """Slots for a trainer, allocated and faulted in. What does not fit it stays readable until a newer commit.

    Raises ConfigError, with the arithmetic, where there is no room; nothing is left of what was made then.
    """
    header, rank, line = blank(attach, layout, text), attach.rank, (attach.attempt, int(attach.generation))
    tier.look(rank)
    mine = {number: tier.files[rank, number] for number in tier.ring.of(rank)}
    fitting = [number for number, slot in mine.items() if _fits(slot, header, fresh=attach.fresh)]
    tier.ring = facts.attached(tier.ring, rank, line, obsolete=set(mine) - set(fitting))
    await _make_room(tier)
    missing = max(0, slots_of(attach) - len(fitting))
    used = set(tier.ring.of(rank))
    numbers = [number for number in range(len(used) + missing) if number not in used][:missing]
    made = await anyio.to_thread.run_sync(_make, tier, attach, header, text, numbers)
    return _seat(tier, attach, line, fitting, made)


def _seat(tier: Tier, attach: Attach, line: Line, fitting: list[int], made: dict[int, SlotFile]) -> Seat:
    tier.files.update({(attach.rank, number): slot for number, slot in made.items()})
    tier.ring = facts.attached(tier.ring, attach.rank, line, new=made, turn=attach.turn)
    about = Attachment(rank=attach.rank, shards=attach.shards, fresh=attach.fresh, turn=attach.turn)
    return Seat(attach.rank, line, attach.trainer, tuple(sorted([*fitting, *made])), about)


def _fits(slot: SlotFile, header: SlotHeader, *, fresh: bool) -> bool:
    have = slot.header
    same = msgspec.structs.replace(
        have, sequence=-1, state=SlotState.FREE, checkpoint=None, writer=None, tail_bytes=0, root=""
    )
    return same == header and not (fresh and have.checkpoint is not None)


async def _make_room(tier: Tier) -> None:
    """What nobody needs goes before new slots come, not beside them."""
    for key in facts.removable(tier.ring):
        await anyio.to_thread.run_sync(tier.folder.remove, tier.forget(key))


def _replicas_to_come(tier: Tier, attach: Attach) -> int:
    """Files that partners will want here, as many as ours will take there; less those that are here already."""
    if attach.local_world_size == attach.world_size:
        return 0
    return max(0, REPLICA_FILES * attach.policy.replicas * attach.local_world_size - len(tier.folder.replicas()))


def _parity_to_come(tier: Tier, attach: Attach, file_bytes: Bytes) -> Bytes:
    """What the parity files will take here, if all nodes are alike; less what is there already."""
    if attach.local_world_size == attach.world_size or not attach.policy.xor:
        return 0
    nodes = -(-attach.world_size // attach.local_world_size)
    each = parity_bytes(file_bytes * attach.local_world_size, nodes, attach.policy.xor)
    there = (os.path.join(tier.folder.path, NAME.format(k)) for k in range(FILES))
    return max(0, FILES * each - sum(os.path.getsize(path) for path in there if os.path.exists(path)))


def _make(tier: Tier, attach: Attach, header: SlotHeader, text: bytes, numbers: list[int]) -> dict[int, SlotFile]:
    folder = tier.folder.path
    here = {key[0] for key in tier.files} | {attach.rank}
    each = slots_of(attach)
    need = Need(
        file_bytes=header.file_bytes,
        slots=len(numbers),
        others=max(0, attach.local_world_size - len(here)),
        slots_each=each,
        replicas=_replicas_to_come(tier, attach),
        parity=_parity_to_come(tier, attach, header.file_bytes),
    )
    if numbers:
        check_room(folder, need)
    made: dict[int, SlotFile] = {}
    try:
        for number in numbers:
            made[number] = tier.folder.create(attach.rank, number, header, text)
    except (OSError, HostError) as exc:
        for slot in made.values():
            tier.folder.remove(slot)
        raise ConfigError(f"{explain(folder, need, room_in(folder))} ({exc})") from exc
    return made
