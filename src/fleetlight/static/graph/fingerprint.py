# SPDX-License-Identifier: Apache-2.0
"""Comparison of the programs of two workers, and their first difference.

Names of nodes, values, batch sizes and the numbers of devices may differ between workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from fleetlight.static.graph.form import Form, Sizes
from fleetlight.torch_compat.operators import OpOverload

#: the name of a part of a program, and its description
Entry = tuple[str, str]


def fingerprint(form: Form) -> str:
    """A digest that is equal for equal computations, in every process."""
    return digest(entries(form))


def digest(listed: Sequence[Entry]) -> str:
    """SHA-256 of entries."""
    return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()


def entries(form: Form) -> list[Entry]:
    """Inputs, operations and fetches, one entry each."""
    return list(_entries(form))


def _entries(form: Form) -> Iterator[Entry]:
    sizes = Sizes(form)
    inputs = iter([*map(str, form.state), *(f"feed {feed.name}" for feed in form.feeds)])
    numbers: dict[fx.Node, int] = {}
    names: dict[str, int] = {}
    counts = {"input": 0, "operation": 0}
    for number, node in enumerate(form.graph.nodes):
        numbers[node] = names[node.name] = number
        kind = "input" if node.op == "placeholder" else "operation"
        made = sizes.value(node.meta.get("val"))
        what = next(inputs) if kind == "input" else _called(node, numbers)
        yield f"{kind} {counts[kind]}", f"{what}: {made}"
        counts[kind] += 1
    yield "schedule", repr(form.schedule)
    yield from ((f"fetch {name}", f"value {names[node]}") for name, node in form.fetches.items())


def _called(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    """`aten.mm.default(%3, %7) in forward`."""
    given = [_text(value, numbers) for value in node.args]
    given += [f"{name}={_text(value, numbers)}" for name, value in node.kwargs.items()]
    part = node.meta.get("part", "forward")
    return f"{_name(node.target)}({', '.join(given)}) in {part}"


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else target.__name__


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, numbers) for item in value)}]"
    if isinstance(value, torch.device):
        # each worker has its own device number
        return value.type
    return repr(value)


def first_difference(zero: Sequence[Entry], other: Sequence[Entry], index: int) -> str | None:
    """The first difference between the programs of worker 0 and another worker, or None."""
    for mine, theirs in zip(zero, other, strict=False):
        if mine != theirs:
            return _difference(mine, theirs, index)
    if len(zero) == len(other):
        return None
    longer, who = (zero, 0) if len(zero) > len(other) else (other, index)
    name, text = longer[min(len(zero), len(other))]
    return f"{name}: {_short(text)} on worker {who}, nothing on worker {index - who}"


def _difference(mine: Entry, theirs: Entry, index: int) -> str:
    if mine[0] != theirs[0]:
        one, other = (f"{name}, {_short(text)}," for name, text in (mine, theirs))
        return f"{one} on worker 0 where worker {index} has {other.rstrip(',')}"
    one, other = mine[1], theirs[1]
    if _short(one) != _short(other):
        one, other = _short(one), _short(other)
    return f"{mine[0]}: {one} on worker 0, {other} on worker {index}"


def _short(text: str) -> str:
    """`mm` for `aten.mm.default(%3, %7) in forward: float32[2]`; an input stays whole."""
    called, bracket, _ = text.partition("(")
    if not bracket or " " in called:
        return text
    name = called.removeprefix("aten.")
    return name.removesuffix(".default")
