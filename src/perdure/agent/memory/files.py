"""The folder of slots: its files are made with all their memory, found again by a later server, and removed.

    own-RANK-NUMBER.slot            of this node's ranks
    peer-NODE-RANK-NUMBER.slot      replicas for other nodes, written by `transfer`
    parity-K.xor                    of the slots of other nodes of this one's group (`parity`)
    borrowed-….slot                 parts of other nodes' slots, for a restore
    world-ATTEMPT-GENERATION.json   which shards the ranks of a generation hold
    asides.json                     what was found to be bad after it was restored
    lock                            whose it all is

It does not know which slot may be written, nor what is good in it.
"""

import mmap
import os
import re
import shutil
from urllib.parse import quote

import msgspec
import xxhash

from perdure.agent.memory.lock import Owner, take_lock
from perdure.agent.memory.ring import Key
from perdure.errors import CorruptCheckpointError, HostError
from perdure.vocab.checkpoint import Aside, Held, Level, Shards, SlotState
from perdure.vocab.ids import JobId, Rank
from perdure.wire import slotfile
from perdure.wire.slots import DATA_START, SlotHeader

_ASIDES = "asides.json"
_OWN = re.compile(r"own-(\d+)-(\d+)\.slot")


class SlotFile:
    """One open and mapped slot of this node. `header` is what was last read or written here."""

    def __init__(self, path: str, fd: int, header: SlotHeader) -> None:
        self.path, self.fd, self.header = path, fd, header
        self.map: mmap.mmap = slotfile.map_slot(fd, writable=True)

    def reread(self) -> SlotHeader:
        """The header as the trainer may have left it. Raises CorruptCheckpointError."""
        self.header = slotfile.read_header(self.fd)
        return self.header

    def put(self, **changes: object) -> SlotHeader:
        """Write the header with these changes."""
        self.header = slotfile.write_header(self.fd, msgspec.structs.replace(self.header, **changes))
        return self.header

    def clear(self) -> None:
        """FREE: what is in it is no checkpoint any more."""
        self.put(state=SlotState.FREE, checkpoint=None, writer=None, root="", tail_bytes=0)

    def hashed(self) -> memoryview:
        """The region that is hashed. Release it."""
        return memoryview(self.map)[DATA_START : self.header.hashes_start]

    def close(self) -> None:
        try:
            self.map.close()
        except BufferError:
            pass  # a thread still hashes it; the map ends with the thread's view
        os.close(self.fd)


def default_folder(job: JobId, node: str, home: str = "") -> str:
    """`home`: the job's folder. Two jobs of one name in two homes may run at once on one machine."""
    name = (
        quote(job, safe="") if not home else f"{quote(job, safe='')}-{xxhash.xxh3_64_hexdigest(os.fsencode(home))[:8]}"
    )
    return os.path.join(base_folder(), name, quote(node, safe=""))


def base_folder() -> str:
    return f"/dev/shm/perdure-{os.getuid()}"


def remove_folder(path: str) -> None:
    """Remove what a node that is over has left in its default folder."""
    shutil.rmtree(path, ignore_errors=True)
    for folder in (os.path.dirname(path), base_folder()):
        try:
            os.rmdir(folder)
        except OSError:
            return  # another node's or job's folder is there, or nothing was


class Folder:
    """One node's folder; made, locked and swept of what no server can use. Blocking: call it in a thread."""

    def __init__(self, path: str, owner: Owner) -> None:
        self.path, self._job = path, owner.job
        try:
            self._lock: int | None = take_lock(path, owner)
            os.chmod(path, 0o700)
        except OSError as exc:
            raise HostError(f"the folder {path} for checkpoints cannot be used: {_words(exc)}") from exc

    def adopt(self) -> dict[Key, SlotFile]:
        """Slots of this job that an earlier server left; what is torn or foreign is freed or removed."""
        found: dict[Key, SlotFile] = {}
        for name in sorted(os.listdir(self.path)):
            own = _OWN.fullmatch(name)
            if own is not None:
                slot = self._open(name, int(own[1]))
                if slot is not None:
                    found[Rank(int(own[1])), int(own[2])] = slot
            elif name.startswith("borrowed-") or (name.startswith("peer-") and not self._is_whole(name)):
                self._unlink(name)
        return found

    def create(self, rank: Rank, number: int, header: SlotHeader, layout: bytes) -> SlotFile:
        """A new slot, all of its memory there. Raises OSError (ENOSPC …) and leaves nothing then."""
        path = os.path.join(self.path, f"own-{rank}-{number}.slot")
        fd = slotfile.create(path, header.file_bytes)
        try:
            os.pwrite(fd, layout, header.layout_start)
            slot = SlotFile(path, fd, slotfile.write_header(fd, header))
            slotfile.populate(slot.map)
            return slot
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise

    def remove(self, slot: SlotFile) -> None:
        self._unlink(os.path.basename(slot.path))
        slot.close()

    # --- what else is in it ------------------------------------------------------------------------------------------

    def replicas(self) -> dict[str, SlotHeader]:
        """Sealed replicas for other nodes: header by path."""
        found = {}
        for name in sorted(os.listdir(self.path)):
            header = self._header(name) if name.startswith("peer-") else None
            if header is not None and header.state is SlotState.SEALED and header.checkpoint is not None:
                found[os.path.join(self.path, name)] = header
        return found

    def worlds(self) -> tuple[Shards, ...]:
        """What is known of generations whose checkpoints may be here."""
        found = []
        for name in sorted(os.listdir(self.path)):
            if name.startswith("world-") and name.endswith(".json"):
                try:
                    with open(os.path.join(self.path, name), "rb") as file:
                        found.append(msgspec.json.decode(file.read(), type=Shards))
                except (OSError, msgspec.DecodeError):
                    self._unlink(name)
        return tuple(found)

    def keep_world(self, world: Shards) -> None:
        """Whole or not at all."""
        path = os.path.join(self.path, f"world-{world.attempt}-{world.generation}.json")
        with open(f"{path}.new", "wb") as file:
            file.write(msgspec.json.encode(world))
        os.rename(f"{path}.new", path)

    def drop_world(self, world: Shards) -> None:
        self._unlink(f"world-{world.attempt}-{world.generation}.json")

    def asides(self) -> tuple[Aside, ...]:
        """What is known to be bad."""
        try:
            with open(os.path.join(self.path, _ASIDES), "rb") as file:
                return msgspec.json.decode(file.read(), type=tuple[Aside, ...])
        except (OSError, msgspec.DecodeError):
            return ()

    def keep_asides(self, asides: tuple[Aside, ...]) -> None:
        """Whole or not at all. Raises HostError."""
        path = os.path.join(self.path, _ASIDES)
        try:
            with open(f"{path}.new", "wb") as file:
                file.write(msgspec.json.encode(asides))
            os.rename(f"{path}.new", path)
        except OSError as exc:
            raise HostError(f"what was set aside cannot be kept in {self.path}: {_words(exc)}") from exc

    def drop(self, path: str) -> None:
        """Remove a replica or a borrowed file."""
        self._unlink(os.path.basename(path))

    def drop_borrowed(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith("borrowed-"):
                self._unlink(name)

    def close(self, *, remove: bool) -> None:
        """Let go of it; `remove`: the job has ended, and nothing of it is left."""
        if self._lock is None:
            return
        if remove:
            for name in os.listdir(self.path):
                self._unlink(name)
            for folder in (self.path, os.path.dirname(self.path)):
                try:
                    os.rmdir(folder)
                except OSError:
                    break  # another node of the job has its folder there
        os.close(self._lock)
        self._lock = None

    def _open(self, name: str, rank: int) -> SlotFile | None:
        path = os.path.join(self.path, name)
        try:
            fd = slotfile.open_slot(path, writable=True)
            try:
                header = slotfile.read_header(fd)
                if header.job != self._job or header.rank != rank:
                    raise CorruptCheckpointError("a slot of another job or rank")
                slot = SlotFile(path, fd, header)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, CorruptCheckpointError):
            self._unlink(name)
            return None
        if header.state is SlotState.WRITING or (header.state is not SlotState.FREE and header.checkpoint is None):
            slot.clear()
        return slot

    def _is_whole(self, name: str) -> bool:
        header = self._header(name)
        return header is not None and header.state is SlotState.SEALED and header.job == self._job

    def _header(self, name: str) -> SlotHeader | None:
        try:
            fd = slotfile.open_slot(os.path.join(self.path, name))
        except OSError:
            return None
        try:
            return slotfile.read_header(fd)
        except CorruptCheckpointError:
            return None
        finally:
            os.close(fd)

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(os.path.join(self.path, name))
        except OSError:
            return  # gone already, or a folder that is not ours


def held(header: SlotHeader, level: Level) -> Held:
    """What control is told of a sealed slot."""
    assert header.checkpoint is not None
    return Held(
        checkpoint=header.checkpoint,
        rank=header.rank,
        world_size=header.world_size,
        level=level,
        layout=header.layout,
        shards=header.shards,
        root=header.root,
        nbytes=header.data_bytes + header.tail_bytes,
    )


def _words(exc: OSError) -> str:
    return os.strerror(exc.errno or 0).lower()
