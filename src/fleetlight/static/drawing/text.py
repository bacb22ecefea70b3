# SPDX-License-Identifier: Apache-2.0
"""A program as text: inputs, state, and operations, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fleetlight.errors import counted, first_names
from fleetlight.static.graph.form import Form, Sizes
from fleetlight.static.graph.state import KINDS
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.torch_compat.operators import OpOverload

#: names and values that are listed; more are counted
_FEW = 4
#: the widest column that is padded
_WIDEST = 36
Row = tuple[str, str, str]


def summary(form: Form) -> str:
    """An overview of a program."""
    rows = [("feeds", ", ".join(map(str, form.feeds)) or "none"), *_state(form)]
    calls = [short_name(node) for node in form.graph.nodes if node.op == "call_function"]
    often = ", ".join(f"{count} {name}" for name, count in Counter(calls).most_common(_FEW))
    rows.append(("operations", f"{len(calls)}: {often}" if calls else "none"))
    rows.append(("fetches", ", ".join(form.fetches) or "every value by its name"))
    rows += [("pass", report) for report in form.reports]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)


def _state(form: Form) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        tensors = [slot.tensor for slot in form.state if slot.kind == kind]
        if tensors and kind != "weight":
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            yield kind, f"{counted(len(tensors), 'tensor')}, {bytes_text(size)}"
    if names := unused(form):
        yield "unused", f"{_few(names)}: the program does not read them, they do not change"
    if names := untrained(form):
        yield "untrained", f"{_few(names)}: the loss does not depend on them, they do not change"


def unused(form: Form) -> list[str]:
    """Parameters that the program does not read."""
    tables = {id(lookup.layer.weight) for lookup in form.lookups}
    return [
        slot.name
        for slot, node in zip(form.state, form.graph.nodes, strict=False)
        if slot.kind == "parameter" and not node.users and id(slot.tensor) not in tables
    ]


def untrained(form: Form) -> list[str]:
    """Parameters that are used and require a gradient, but have none."""
    trained = {node.args[1] for node in form.graph.nodes if node.target is GRADIENT}
    if not trained:
        return []
    known = {*trained, *unused(form)}
    tables = {id(lookup.layer.weight) for lookup in form.lookups if lookup.table in _pushed(form)}
    return [
        slot.name
        for slot in form.state
        if slot.kind == "parameter" and slot.tensor.requires_grad and slot.name not in known
        if id(slot.tensor) not in tables
    ]


def _pushed(form: Form) -> Collection[str]:
    """Tables whose rows are trained."""
    return () if form.split is None else form.split.pushes.keys()


def explanation(names: Sequence[str], reports: Sequence[str]) -> str:
    """A line for each pass: its name, if known, and its report."""
    if len(names) != len(reports):
        # a loaded or rewritten program has reports without names
        names = [""] * len(reports)
    width = max(map(len, names), default=0)
    lines = [
        f"{name:<{width}}  {report}".lstrip() for name, report in zip(names, reports, strict=True)
    ]
    return "\n".join(lines) or "no passes"


def listing(form: Form) -> str:
    """One line for each input, operation and named value: its name, value and operation."""
    rows = list(_rows(form))
    first, second = (_width(row[column] for row in rows) for column in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in rows)


def _rows(form: Form) -> Iterator[Row]:
    sizes = Sizes(form)
    inputs = iter([*map(str, form.state), *(f"feed {feed.name}" for feed in form.feeds)])
    for node in form.graph.nodes:
        made = _made(node, sizes)
        if node.op == "placeholder":
            yield node.name, made, next(inputs)
        elif node.op == "call_function":
            given = [_told(value) for value in node.args]
            given += [f"{name}={_told(value)}" for name, value in node.kwargs.items()]
            yield node.name, made, f"{short_name(node)}({', '.join(given)})"
    yield from ((str(node), "", f"fetch {name}") for name, node in form.fetches.items())


def _made(node: fx.Node, sizes: Sizes) -> str:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return f"{len(value)} values"
    return sizes.value(value) or "-"


def _width(texts: Iterable[str]) -> int:
    return min(_WIDEST, max(map(len, texts), default=0))


def short_name(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target))
    name = target.overloadpacket.__name__
    return name if target.namespace == "aten" else f"{target.namespace}.{name}"


def _told(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{_few([_told(item) for item in value])}]"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, torch.device) else repr(value)


def _few(texts: Sequence[str]) -> str:
    """The first texts, and the number of the others."""
    # "1 more" would be as long as the last text
    return ", ".join(texts) if len(texts) == _FEW + 1 else first_names(texts, _FEW)


def bytes_text(size: int) -> str:
    """`1.50 MiB`, `3.00 KiB`, `8 B`."""
    for unit, name in ((20, "MiB"), (10, "KiB")):
        if size >= 1 << unit:
            return f"{size / (1 << unit):.2f} {name}"
    return f"{size} B"
