# SPDX-License-Identifier: Apache-2.0
"""Makes almost valid frames: all messages, with all kinds of damage."""

import dataclasses
import random
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.ps.serving import DIM, OPTIONS

from fleetlight.ps import messages as m
from fleetlight.ps.plan import Plan
from fleetlight.ps.transport.protocol import ALIGNMENT, DTYPES, Prefix

Array = NDArray[Any]
Words = tuple[Any, Sequence[Array]]
MESSAGES: list[type] = sorted(typing.get_args(m.Message), key=lambda kind: kind.__name__)
_NUMBERS = (0, 1, 2, 3, -1, 7, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 1 << 40)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "..", "../x", "/", "\0", "a/b", "é" * 30, "control", "x" * 3000)
#: a deadline that no test reaches
_DEADLINE_S = 0.05


@dataclasses.dataclass
class Frame:
    """A frame before it is encoded; its parts may be invalid."""

    header: bytes
    body: bytes
    #: the lengths in its prefix, where they are wrong
    lengths: tuple[int, int] | None = None

    def packed(self) -> bytes:
        """The encoded frame."""
        lengths = self.lengths or (len(self.header), len(self.body))
        return Prefix(*lengths).pack() + self.header + self.body


def any_value(chance: random.Random, kind: Any, depth: int = 0) -> Any:
    """A value of a type, often a boundary value."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    simple: dict[Any, Callable[[], Any]] = {
        bool: lambda: chance.random() < 0.5,
        int: lambda: chance.choice(_NUMBERS[: 4 if chance.random() < 0.6 else None]),
        float: lambda: chance.choice(_FLOATS),
        str: lambda: chance.choice(_TEXTS),
        bytes: lambda: chance.choice((b"", b"x" * 32, b"\xff" * 3000)),
        Any: lambda: chance.choice((None, 1, "x", [1], {"lr": 1.0}, _FLOATS[-1])),
        type(None): lambda: None,
    }
    if kind in simple:
        return simple[kind]()
    count = 0 if depth > 3 else chance.randrange(3)
    if origin is list:
        return [any_value(chance, inside[0], depth + 1) for _ in range(count)]
    if origin is dict:
        of = (typing.get_args(kind)[0], typing.get_args(kind)[1])
        return {
            any_value(chance, of[0], depth + 1): any_value(chance, of[1], depth + 1)
            for _ in range(count)
        }
    if origin is tuple:
        kinds = [inside[0]] * count if inside[-1] is Ellipsis else inside
        return tuple(any_value(chance, one, depth + 1) for one in kinds)
    if origin in (typing.Union, types.UnionType):
        return any_value(chance, chance.choice(inside), depth + 1)
    if origin is typing.Annotated:
        return any_value(chance, inside[0], depth)
    fields = msgspec.structs.fields(kind)
    return kind(**{f.name: any_value(chance, f.type, depth + 1) for f in fields})


def any_message(chance: random.Random) -> Any:
    """Any message, with any values of the right types."""
    return any_value(chance, chance.choice(MESSAGES))


def any_arrays(chance: random.Random) -> list[Array]:
    """A few arrays, small, of any type and shape."""
    return [_any_array(chance) for _ in range(chance.choice((0, 0, 1, 2, 3)))]


def _any_array(chance: random.Random) -> Array:
    dtype = chance.choice(list(DTYPES.values()))
    shape = tuple(chance.randrange(4) for _ in range(chance.randrange(4)))
    data = chance.randbytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    if dtype == np.bool_:
        data = bytes(one & 1 for one in data)
    return np.frombuffer(data, dtype).reshape(shape)


def sensible(chance: random.Random, plan: Plan, sequence: int, folder: str) -> Words:
    """A message that a server with that plan can execute."""
    ids = np.array(sorted({chance.randrange(-4, 40) for _ in range(3)}), np.int64)
    rows = np.full((len(ids), DIM), chance.random(), np.float32)
    dense = np.ones(3, np.float32)
    table, token = chance.randrange(2), "token"
    state = m.RestoreDense([], [{}]), [dense]
    options: list[dict[str, Any]] = OPTIONS
    push = m.Push(
        sequence, 0, 0, sequence, 0, options, [m.TablePush(table)], True,
        hold=chance.random() < 0.2, skip=chance.random() < 0.1,
    )  # fmt: skip
    choices: list[Words] = [
        (push, [ids, rows, dense]),
        (push, [ids, rows, dense]),
        (m.Apply(sequence, 0, 0, sequence, 0, 0.5, options), []),
        (m.Pull([m.TablePull(table, chance.random() < 0.5)], True, ahead=True, batch=2), [ids]),
        (m.GeoExchange(sequence, 0, 0, [table], True), [ids, rows, dense]),
        (m.Fill([table], True), [ids, rows, dense]),
        (m.Join(plan), []),
        (m.EndPhase(0), []),
        (m.Barrier(1, "barrier", _DEADLINE_S), [np.ones(4, np.uint8)]),
        (m.Heartbeat(3), []),
        (m.GoodbyeAck(), []),
        (m.LeaseRequest(0, 1, 0, chance.randrange(3), (-1, 0), 1, [(0, 40)], 4, 2), []),
        (m.LeaseProgress(0, 1, (chance.randrange(3), 4), chance.random() < 0.2), []),
        (m.RemainingRequest(0, chance.randrange(3)), []),
        (m.SnapshotRequest(), []),
        (m.SnapshotRequest("new", "base", delta=chance.random() < 0.5), []),
        (m.Save(chance.choice(("", folder)), token, 0), []),
        (m.ReadFile("table000.server000.safetensors", 0, 100), []),
        (
            m.WriteFile("table000.server000.safetensors", 0),
            [np.frombuffer(chance.randbytes(64), "u1")],
        ),
        (m.DropSnapshot(), []),
        (m.FetchDense(), []),
        (m.Load("", [(0, "table000.server000.safetensors")], 1, dry=chance.random() < 0.5), []),
        state,
        (m.Shrink(table, 0, 0.5, 0.9), []),
        (m.MetricsRequest(), []),
    ]
    if chance.random() < 0.01:
        return m.Leave(chance.choice(("", "an error"))), []
    return chance.choice(choices)


def at_the_edge(chance: random.Random, words: Words) -> Words:
    """The message with another value of the right type, or other numbers in its arrays."""
    message, arrays = words
    fields = msgspec.structs.fields(type(message))
    if arrays and (not fields or chance.random() < 0.4):
        return message, [_strange(chance, array) for array in arrays]
    if not fields:
        return words
    field = chance.choice(fields)
    return msgspec.structs.replace(message, **{field.name: any_value(chance, field.type)}), arrays


def _strange(chance: random.Random, array: Array) -> Array:
    array = array.copy()
    if array.size and chance.random() < 0.7:
        flat = array.reshape(-1)
        if array.dtype.kind == "f":
            flat[chance.randrange(len(flat))] = chance.choice((np.nan, np.inf, -np.inf, 3e38))
        elif array.dtype == np.int64:
            flat[chance.randrange(len(flat))] = chance.choice((-(1 << 63), (1 << 63) - 1, -1))
    return array


def framed(request: int, words: Words) -> Frame:
    """A valid frame."""
    message, arrays = words
    specs = [(_name(array), array.shape) for array in arrays]
    header = msgspec.msgpack.encode((request, message, specs))
    body = b""
    for array in arrays:
        if array.nbytes:
            body += bytes(-len(body) % ALIGNMENT) + array.tobytes()
    return Frame(header, body)


def _name(array: Array) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


def damaged(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    """The bytes of a frame with some damage."""
    return chance.choice(_DAMAGES)(chance, dataclasses.replace(frame), other)


def _other_value(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    """Another value, or one of another type, in the header."""
    content = msgspec.msgpack.decode(frame.header)
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if not (isinstance(inner, (dict, list)) and inner) or chance.random() < 0.2:
            break
        place = inner
    wrong: Any = chance.choice((*_NUMBERS, *_FLOATS, *_TEXTS, None, [], {}, [1, 2], b"x", True))
    if isinstance(place, dict) and chance.random() < 0.1:
        del place[key]
    else:
        place[key] = wrong
    frame.header = msgspec.msgpack.encode(content)
    return frame.packed()


def _flipped(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    data = bytearray(frame.packed())
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _flipped_header(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    header = bytearray(frame.header)
    for _ in range(chance.choice((1, 1, 3))):
        header[chance.randrange(len(header))] = chance.randrange(256)
    frame.header = bytes(header)
    return frame.packed()


def _cut(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    data = frame.packed()
    return data[: chance.randrange(len(data))]


def _other_lengths(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    sizes = (0, 1, 8, len(frame.header), len(frame.body), 1 << 20, (1 << 32) - 1)
    frame.lengths = chance.choice(sizes), chance.choice((*sizes, 1 << 33, 1 << 45, (1 << 64) - 1))
    return frame.packed()


def _other_header(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    frame.header = other.header
    return frame.packed()


def _nonsense(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    frame.header = chance.choice(
        (
            b"\x91" * chance.choice((10, 3000)),
            b"\xdd\xff\xff\xff\xff",
            b"\x93\x01\xdf\xff\xff\xff\xff",
            b"\x81\xa4type" * 500,
            chance.randbytes(chance.randrange(60)),
            frame.header + chance.randbytes(4),
        )
    )
    return frame.packed()


def _other_specs(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    """The header announces other or much larger arrays than those sent."""
    content = msgspec.msgpack.decode(frame.header)
    sizes = (0, 1, 3, 1 << 20, 1 << 31, 1 << 40, 1 << 62)
    content[2] = [
        (chance.choice((*DTYPES, "object", 3)), [chance.choice(sizes) for _ in range(n)])
        for n in [chance.randrange(4) for _ in range(chance.choice((1, 1, 2, 40)))]
    ]
    frame.header = msgspec.msgpack.encode(content)
    if chance.random() < 0.5:
        # and the prefix agrees
        frame.lengths = len(frame.header), _announced(content[2]) % (1 << 64)
    return frame.packed()


def _announced(specs: Sequence[tuple[Any, list[int]]]) -> int:
    end = 0
    for name, shape in specs:
        size = int(np.prod([1, *shape], dtype=object)) * (
            DTYPES[name].itemsize if name in DTYPES else 1
        )
        end += (-end % ALIGNMENT + size) if size else 0
    return end


def _random(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    return chance.choice((b"", frame.packed()[:5], b"GET / ")) + chance.randbytes(
        chance.randrange(80)
    )


def _followed(chance: random.Random, frame: Frame, other: Frame) -> bytes:
    return frame.packed() + chance.randbytes(chance.randrange(1, 30))


_DAMAGES = (
    _other_value, _other_value, _other_value, _flipped, _flipped_header, _flipped_header, _cut,
    _other_lengths, _other_header, _nonsense, _other_specs, _random, _followed,
)  # fmt: skip
