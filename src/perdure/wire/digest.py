"""Checksums of what is in a slot: XXH3-128 per chunk, one root over them, and the names of layouts and shards.

Knows bytes and layouts; does not open files. xxhash releases the GIL, so that threads help.
"""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from perdure.vocab.checkpoint import CheckpointId, Layout
from perdure.vocab.units import Bytes
from perdure.wire.slots import CHUNK, HASH


def chunk_digests(view: memoryview, threads: int = 1) -> bytes:
    """HASH bytes per CHUNK of `view` (a slot's region from DATA_START to its hashes), in order."""
    starts = range(0, view.nbytes, CHUNK)
    if threads <= 1 or len(starts) <= 1:
        return b"".join(chunk_digest(view, start) for start in starts)
    with ThreadPoolExecutor(min(threads, len(starts)), thread_name_prefix="hash") as pool:
        return b"".join(pool.map(lambda start: chunk_digest(view, start), starts))


def chunk_digest(view: memoryview, start: int) -> bytes:
    """Of the CHUNK (the last one may be shorter) that begins at byte `start` of `view`."""
    with view[start : start + CHUNK] as chunk:
        return xxhash.xxh3_128_digest(chunk)


def data_digest(view: memoryview, digests: bytes, nbytes: Bytes) -> str:
    """One hash, hexadecimal, of the first `nbytes` of `view`, of which `digests` are the chunks'; empty for none."""
    if not nbytes:
        return ""
    whole = nbytes // CHUNK
    found = xxhash.xxh3_128(digests[: whole * HASH])
    with view[whole * CHUNK : nbytes] as rest:
        found.update(rest)
    return found.hexdigest()


def bad_chunks(view: memoryview, digests: bytes | memoryview, threads: int = 1) -> tuple[int, ...]:
    """Numbers of the chunks of `view` whose hash is not the one in `digests`."""
    found = chunk_digests(view, threads)
    return tuple(
        number
        for number in range(len(found) // HASH)
        if found[number * HASH : (number + 1) * HASH] != bytes(digests[number * HASH : (number + 1) * HASH])
    )


def root_of(digests: bytes | memoryview, layout_hash: str, checkpoint: CheckpointId) -> str:
    """One hash, hexadecimal, for a whole slot: its chunks, how they are to be read, and of which checkpoint it is."""
    whole = xxhash.xxh3_128(bytes(digests))
    whole.update(layout_hash.encode())
    whole.update(str(checkpoint).encode())
    return whole.hexdigest()


def layout_hash(layout: Layout) -> str:
    """Equal for slots that can be read in the same way, whoever's they are."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(layout, rank=0, world_size=0)))


def shards_hash(layout: Layout) -> str:
    """Equal for slots that hold the same logical shards, in whatever order and place."""
    shards = sorted((part.name, part.offsets, part.shape, part.dtype) for part in layout.parts)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(shards))
