"""Sealing: the hashes of a written slot are made from the first copy, and stored beside it; and checked again later.

Blocking, for threads: hashing gives the interpreter to others while it works. Knows one slot at a time.
"""

import os

from perdure.agent.memory.files import SlotFile
from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.wire import slotfile
from perdure.wire.digest import bad_chunks, chunk_digests, data_digest, root_of
from perdure.wire.slots import SlotHeader


def seal(slot: SlotFile, checkpoint: CheckpointId, threads: int) -> str:
    """WRITTEN → SEALED; gives the hash of the tensors alone, empty where there are none.

    Raises CorruptCheckpointError where the slot is not (or no more) that written checkpoint.
    """
    header = _expect(slot, checkpoint, SlotState.WRITTEN)
    with slot.hashed() as view:
        digests = chunk_digests(view, threads)
        data = data_digest(view, digests, header.data_bytes)
    os.pwrite(slot.fd, digests, header.hashes_start)
    _expect(slot, checkpoint, SlotState.WRITTEN)  # a script that writes into a slot that it has given back
    slot.put(state=SlotState.SEALED, root=root_of(digests, header.layout, checkpoint))
    return data


def verify(slot: SlotFile, threads: int) -> tuple[int, ...]:
    """Numbers of the chunks of a sealed slot that are not what was sealed.

    Raises CorruptCheckpointError where the hashes themselves, the layout or the header are not.
    """
    header = slotfile.read_header(slot.fd)
    digests = slotfile.read_digests(slot.fd, header)
    if header.state is not SlotState.SEALED or header.checkpoint is None:
        raise CorruptCheckpointError(f"{slot.path} is not sealed")
    if root_of(digests, header.layout, header.checkpoint) != header.root:
        raise CorruptCheckpointError(f"the hashes of {slot.path} are not those that were sealed")
    with slot.hashed() as view:
        return bad_chunks(view, digests, threads)


def _expect(slot: SlotFile, checkpoint: CheckpointId, state: SlotState) -> SlotHeader:
    header = slotfile.read_header(slot.fd)
    if header.state is not state or header.checkpoint != checkpoint:
        raise CorruptCheckpointError(f"{slot.path} holds {header.state} {header.checkpoint}, not {state} {checkpoint}")
    slot.header = header
    return header
