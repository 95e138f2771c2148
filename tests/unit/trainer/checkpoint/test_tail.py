"""Values that are no tensors go into a tail and come out the same; bytes of a stranger make nothing else."""

import pickle
import random
from collections import Counter, OrderedDict

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import ConfigError, CorruptCheckpointError
from perdure.trainer.checkpoint.tail import Tail, decode, decode_tail, encode, encode_tail

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_back_equal_and_of_the_same_types(value: object) -> None:
    back = decode(encode(value))
    assert repr(back) == repr(value)


def test_random_number_states_come_back_usable() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(3)
    states = (random.getstate(), numpy.random.get_state(), generator.bit_generator.state, torch.get_rng_state())
    python, legacy, pcg, own = decode(encode(states))
    drawn = random.random(), numpy.random.rand(), generator.random(), torch.rand(3)
    random.setstate(python)
    numpy.random.set_state(legacy)
    generator.bit_generator.state = pcg
    torch.set_rng_state(own)
    again = random.random(), numpy.random.rand(), generator.random(), torch.rand(3)
    assert drawn[:3] == again[:3]
    assert torch.equal(drawn[3], again[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensor_of_any_dtype_and_shape_comes_back_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = decode(encode({"t": tensor}))["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    if tensor.numel():
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_counters_ordered_dictionaries_and_sets_keep_their_kind() -> None:
    value = [Counter({30: 1}), OrderedDict([("b", 1), ("a", 2)]), {1, 2}]
    back = decode(encode(value))
    assert back == value
    assert [type(item) for item in back] == [Counter, OrderedDict, set]


def test_numpy_scalars_and_arrays_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    value = decode(encode([numpy.float32(1.5), numpy.arange(6).reshape(2, 3), numpy.empty((0, 2))]))
    assert (type(value[0]), value[0]) == (numpy.float32, 1.5)
    assert value[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert value[2].shape == (0, 2)
    value[1][0, 0] = 9  # its own memory, writable


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.worker\[1\] holds a builtins\.object"):
        encode({"data": {"worker": [1, object()]}})


def test_endless_nesting_is_refused_in_both_directions() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ConfigError, match="levels deep"):
        encode(value)
    data = b"\xc0"
    for _ in range(200):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x91" + data))
    with pytest.raises(CorruptCheckpointError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps({"shared": {}}),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"")),
        encode([])[:0]
        + msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["float32", [1 << 60], b""]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["float32", [-1], b"1234"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["load", [1], b"1234"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["|O", [1], b"12345678", False]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["<f4", [1 << 40, 1 << 40], b"", False]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(6, msgspec.msgpack.encode("9" * 10_000))),
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_bytes_of_a_stranger_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode(data)


def test_tail_without_its_two_parts_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="no shared and own"):
        decode_tail(encode([1]))
    tail = Tail({"scheduler.last_epoch": 3}, {"rng": (1, 2)})
    assert decode_tail(encode_tail(tail)) == tail
