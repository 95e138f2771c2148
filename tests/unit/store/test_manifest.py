"""What the files of a stored checkpoint say of themselves: believed only where nothing contradicts it."""

import pickle
from typing import Any

import msgspec
import pytest
import xxhash

from perdure.errors import CorruptCheckpointError
from perdure.store.manifest import (
    CHUNK,
    FileRecord,
    Manifest,
    Part,
    TensorRecord,
    check_parts,
    is_plain_name,
    name_of,
    parse_name,
    pieces_of,
    seal,
    unseal,
)
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import JobId

ID = CheckpointId(attempt=1_700_000_000, generation=2, step=30)  # type: ignore[arg-type]


def a_record(name: str = "__0_0.distcp", nbytes: int = 100) -> FileRecord:
    return FileRecord(name=name, nbytes=nbytes, chunks="0" * 32 * -(-nbytes // CHUNK))


def a_manifest(**changes: Any) -> Manifest:
    whole = Manifest(
        job=JobId("exp"),
        checkpoint=ID,
        world_size=1,
        by_rank=("a",),
        ranks=(0,),
        files=(a_record(),),  # type: ignore[arg-type]
    )
    return msgspec.structs.replace(whole, **changes)


def a_piece(offset: int, rows: int, *, name: str = "w", whole: int = 10) -> TensorRecord:
    return TensorRecord(
        name=name,
        dtype="float32",
        whole=(whole,),
        offsets=(offset,),
        shape=(rows,),
        file="__0_0.distcp",
        start=0,
        nbytes=10,
    )


def a_part(rank: int, *pieces: TensorRecord, shards: str = "a", **changes: Any) -> Part:
    whole = Part(
        rank=rank,  # type: ignore[arg-type]
        world_size=2,
        checkpoint=ID,
        layout="l",
        shards=shards,
        root="r",
        group=(rank,),  # type: ignore[arg-type]
        files=(a_record(f"__{rank}_0.distcp"),),
        tensors=tuple(msgspec.structs.replace(piece, file=f"__{rank}_0.distcp") for piece in pieces),
        values=(),
    )
    return msgspec.structs.replace(whole, **changes)


def test_name_of_a_checkpoint_is_read_back_and_sorts_by_step():
    assert parse_name(name_of(ID)) == ID
    assert parse_name(name_of(ID) + ".tmp") == ID
    names = [name_of(msgspec.structs.replace(ID, step=step)) for step in (9, 10, 1000)]
    assert sorted(names) == names


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\\b", "a\0"])
def test_name_that_leaves_its_folder_is_not_plain(name):
    assert not is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["step-1.1-1", "step-0000000001.1-1/..", "step-0000000001.-1-1", "step-000000000\u0661.1-1", ""]
)
def test_other_names_are_no_checkpoints(name):
    assert parse_name(name) is None


def test_manifest_with_any_bit_flipped_is_refused():
    text = seal(a_manifest())
    assert unseal(text, Manifest, "m") == a_manifest()
    for at in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                unseal(bytes(damaged), Manifest, "m")


def test_manifest_cut_anywhere_is_refused():
    text = seal(a_manifest())
    for end in range(len(text)):
        with pytest.raises(CorruptCheckpointError):
            unseal(text[:end], Manifest, "m")


def sealed(value: object) -> bytes:
    body = msgspec.json.encode(value)[:-1]
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


@pytest.mark.parametrize(
    "files",
    [
        [{"name": "../../etc/passwd", "nbytes": 0, "chunks": ""}],
        [{"name": "/etc/passwd", "nbytes": 0, "chunks": ""}],
        [{"name": "parts/../../x", "nbytes": 0, "chunks": ""}],
        [{"name": "__0_0.distcp\n", "nbytes": 0, "chunks": ""}],
        [{"name": "__0_0.distcp", "nbytes": 1 << 62, "chunks": "00"}],
        [{"name": "__0_0.distcp", "nbytes": -1, "chunks": ""}],
        [{"name": "__0_0.distcp", "nbytes": 1e300, "chunks": ""}],
        [{"name": "__0_0.distcp", "nbytes": 0, "chunks": ""}] * 2,
        "x",
        [[[[]]]],
    ],
)
def test_hostile_manifest_with_a_right_checksum_is_refused(files):
    text = sealed({**msgspec.to_builtins(a_manifest()), "files": files})
    with pytest.raises(CorruptCheckpointError):
        unseal(text, Manifest, "m")


def test_text_that_is_a_pickle_or_nested_without_end_is_refused():
    for body in (pickle.dumps(a_manifest), b"[" * 100_000, b"", b"{}", b"\xff" * 100):
        with pytest.raises(CorruptCheckpointError):
            unseal(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}', Manifest, "m")


def test_part_whose_tensor_lies_outside_of_its_file_or_whole_is_refused():
    good = a_part(0, a_piece(0, 10))
    assert unseal(seal(good), Part, "p") == good
    for change in ({"start": 91}, {"file": "/etc/passwd"}, {"offsets": (1,)}, {"shape": (10, 10)}, {"offsets": (-1,)}):
        bad = msgspec.structs.replace(good, tensors=(msgspec.structs.replace(good.tensors[0], **change),))
        with pytest.raises(CorruptCheckpointError):
            unseal(seal(bad), Part, "p")


def test_format_of_a_later_perdure_is_refused_by_its_number():
    with pytest.raises(CorruptCheckpointError, match="format 2"):
        unseal(seal(a_manifest(version=2)), Manifest, "m")


# --- is everything there? --------------------------------------------------------------------------------------------


def test_parts_that_are_whole_pass_and_replicated_pieces_count_once():
    parts = [a_part(0, a_piece(0, 4), a_piece(0, 3, name="n", whole=3), shards="a")]
    parts.append(a_part(1, a_piece(4, 6), a_piece(0, 3, name="n", whole=3), shards="b"))
    check_parts(parts, ID, ("a", "b"))
    assert [len(pieces) for pieces in pieces_of(parts).values()] == [2, 1]


def test_partial_set_of_parts_is_refused_by_rank():
    """metaseq 53: a partial set is never selected."""
    with pytest.raises(CorruptCheckpointError, match="no part of rank 1"):
        check_parts([a_part(0, a_piece(0, 10))], ID, ("a", "b"))


def test_part_of_a_lost_rank_is_not_needed_where_a_replica_has_all():
    check_parts([a_part(0, a_piece(0, 10))], ID, ("a", "a"))


def test_part_that_shared_its_writing_with_one_that_is_absent_is_refused():
    with pytest.raises(CorruptCheckpointError, match="rank 1"):
        check_parts([a_part(0, a_piece(0, 10), group=(0, 1))], ID, ("a", "a"))


def test_tensor_that_is_not_covered_is_refused_by_its_name():
    with pytest.raises(CorruptCheckpointError, match="9 of the 10 elements of 'w'"):
        check_parts([a_part(0, a_piece(0, 4)), a_part(1, a_piece(5, 5), shards="b")], ID, ("a", "b"))


def test_parts_of_another_line_or_world_are_refused():
    other = msgspec.structs.replace(ID, generation=3)
    for wrong in (a_part(1, shards="b", checkpoint=other), a_part(1, shards="b", world_size=3), a_part(1, shards="c")):
        with pytest.raises(CorruptCheckpointError, match="another checkpoint or world"):
            check_parts([a_part(0, a_piece(0, 10)), wrong], ID, ("a", "b"))
