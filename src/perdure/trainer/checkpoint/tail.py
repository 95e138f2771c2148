"""The tail of a slot: everything that is no tensor of the state, as one msgpack value. Never pickle.

What Python has beyond msgpack (tuples, keys that are no strings, large integers, complex numbers, arrays, tensors) goes
in extension types. Reading bytes of a stranger makes values of these types only, and nothing larger than the bytes.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from perdure.errors import ConfigError, CorruptCheckpointError

TIED = "tied"
"""In the shared values: second name → first name of tensors that are one and the same, and are kept once."""
_DEEPEST = 64
_TUPLE, _PAIRS, _ARRAY, _TENSOR, _COMPLEX, _INTEGER, _ORDERED, _COUNTER, _SET = range(1, 10)
_NATIVE = (bool, float, str, bytes)
_INT64 = range(-(1 << 63), 1 << 63)
_ARRAY_KINDS = "biufcSUmM"
"""NumPy's letters for what has its value in its bytes: everything but objects and records."""
_encoder = msgspec.msgpack.Encoder()


class Tail(msgspec.Struct, frozen=True):
    """What is in a tail."""

    shared: dict[str, Any]
    """By flat name: equal on all ranks."""
    own: dict[str, Any]
    """This rank's: random numbers, position in the data, coordinate."""


def encode_tail(tail: Tail) -> bytes:
    """Raises ConfigError that names the value that cannot be kept."""
    return encode({"shared": tail.shared, "own": tail.own})


def decode_tail(data: bytes | memoryview) -> Tail:
    """Raises CorruptCheckpointError."""
    value = decode(data)
    if isinstance(value, dict) and isinstance(value.get("shared"), dict) and isinstance(value.get("own"), dict):
        return Tail(value["shared"], value["own"])
    raise CorruptCheckpointError("a checkpoint's tail has no shared and own part")


def tied_in(shared: Mapping[str, Any]) -> dict[str, str]:
    """Second name → first name, from a tail's shared values. Raises CorruptCheckpointError."""
    tied = shared.get(TIED, {})
    if not isinstance(tied, dict) or not all(isinstance(name, str) for pair in tied.items() for name in pair):
        raise CorruptCheckpointError("a checkpoint's tail has no names where those of tied tensors belong")
    return tied


def encode(value: object) -> bytes:
    """One msgpack value. Raises ConfigError that names what cannot be kept."""
    return _encoder.encode(_prepare(value, "", 0))


def decode(data: bytes | memoryview) -> Any:
    """What `encode` was given; named tuples, and dictionaries of other kinds, come back as plain ones.

    Raises CorruptCheckpointError.
    """
    try:
        return _decode(data, 0)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, ArithmeticError) as exc:
        raise CorruptCheckpointError(f"a checkpoint's tail cannot be read: {exc}") from exc


# --- writing ---------------------------------------------------------------------------------------------------------


def _prepare(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in _NATIVE:
        return value
    if kind is int:
        return value if value in _INT64 else _ext(_INTEGER, str(value))
    if depth > _DEEPEST:
        raise ConfigError(f"the state {where} is nested more than {_DEEPEST} levels deep")
    if isinstance(value, list):
        return [_prepare(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return _ext(_TUPLE, [_prepare(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)])
    if isinstance(value, Mapping):
        return _prepare_mapping(value, where, depth)
    return _prepare_rare(value, where, depth)


def _prepare_mapping(value: Mapping[Any, Any], where: str, depth: int) -> Any:
    code = _COUNTER if isinstance(value, Counter) else _ORDERED if isinstance(value, OrderedDict) else _PAIRS
    if code == _PAIRS and all(type(key) is str for key in value):
        return {key: _prepare(item, f"{where}.{key}" if where else key, depth + 1) for key, item in value.items()}
    pairs = [[_prepare(key, where, depth + 1), _prepare(v, f"{where}.{key}", depth + 1)] for key, v in value.items()]
    return _ext(code, pairs)


def _prepare_rare(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _prepare_tensor(value, where)
    if isinstance(value, complex):
        return _ext(_COMPLEX, [value.real, value.imag])
    if isinstance(value, set | frozenset):
        return _ext(_SET, [_prepare(item, where, depth + 1) for item in value])
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in _ARRAY_KINDS:
        scalar = type(value).__name__ != "ndarray"
        return _ext(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes(), scalar])
    if isinstance(value, int | float | str | bytes):  # enumerations of numbers, and the like
        native: Any = next(kind for kind in (int, float, str, bytes) if isinstance(value, kind))
        return _prepare(native(value), where, depth)
    raise ConfigError(
        f"the state {where or 'given'} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "kept: give numbers, texts, bytes, lists, tuples, dictionaries, arrays or tensors"
    )


def _prepare_tensor(value: torch.Tensor, where: str) -> msgspec.msgpack.Ext:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(f"the state {where} holds a tensor of a kind that cannot be kept: {type(value).__qualname__}")
    plain = value.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return _ext(_TENSOR, [str(value.dtype).removeprefix("torch."), list(value.shape), _bytes_of(raw)])


def _bytes_of(raw: torch.Tensor) -> bytes:
    # Tensor.numpy() is missing where NumPy is, and tolist() makes an object per byte.
    import ctypes

    return ctypes.string_at(raw.data_ptr(), raw.numel()) if raw.numel() else b""


def _ext(code: int, value: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode(value))


# --- reading ---------------------------------------------------------------------------------------------------------


def _decode(data: bytes | memoryview, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} levels deep")

    def extension(code: int, payload: memoryview) -> Any:
        read = _READ.get(code)
        if read is None:
            raise ValueError(f"extension type {code} is unknown")
        return read(_decode(payload, depth + 1))

    return msgspec.msgpack.Decoder(ext_hook=extension).decode(data)


def _read_array(value: Any) -> Any:
    import numpy as np

    kind, shape, raw, scalar = value
    dtype = np.dtype(kind)
    if dtype.kind not in _ARRAY_KINDS or dtype.hasobject:
        raise ValueError(f"arrays of {kind} are not read")
    array = np.frombuffer(raw, dtype=dtype) if raw else np.empty(0, dtype=dtype)
    array = array.reshape(_checked(shape, len(raw), dtype.itemsize)).copy()
    return array[()] if scalar else array


def _read_tensor(value: Any) -> torch.Tensor:
    name, shape, raw = value
    dtype = dtype_named(name)
    shape = _checked(shape, len(raw), dtype.itemsize)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def dtype_named(name: object) -> torch.dtype:
    """torch's dtype of that name. Raises ValueError where there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def _checked(shape: Any, nbytes: int, itemsize: int) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes are no array of shape {shape}")
    return tuple(shape)


_READ: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _PAIRS: dict,
    _ARRAY: _read_array,
    _TENSOR: _read_tensor,
    _COMPLEX: lambda value: complex(*value),
    _INTEGER: int,
    _ORDERED: OrderedDict,
    _COUNTER: lambda value: Counter(dict(value)),
    _SET: set,
}
