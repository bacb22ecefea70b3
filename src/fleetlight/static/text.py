# SPDX-License-Identifier: Apache-2.0
"""A program as text: what it takes, what it keeps, and what it does, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.form import Form
from fleetlight.static.state import KINDS


def summary(form: Form) -> str:
    """What there is to know at a glance."""
    lines = [f"feeds      {', '.join(map(str, form.feeds)) or 'none'}"]
    for kind in KINDS:
        tensors = [slot.tensor for slot in form.state if slot.kind == kind]
        if tensors and kind != "weight":
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            lines.append(f"{kind:<11}{len(tensors)} tensors, {size / 2**20:.2f} MiB")
    calls = [short_name(node) for node in form.graph.nodes if node.op == "call_function"]
    often = ", ".join(f"{count} {name}" for name, count in Counter(calls).most_common(4))
    lines.append(f"operations {len(calls)}: {often}")
    lines.append(f"fetches    {', '.join(form.fetches) or 'every value by its name'}")
    return "\n".join([*lines, *(f"pass       {report}" for report in form.reports)])


def listing(form: Form) -> str:
    """One line for each input, operation and named value."""
    return "\n".join(_lines(form))


def _lines(form: Form) -> Iterator[str]:
    inputs = iter([*map(str, form.state), *(f"feed {feed.name}" for feed in form.feeds)])
    for node in form.graph.nodes:
        if node.op == "placeholder":
            yield f"{node.name} = {next(inputs)}: {shape_of(node)}"
        elif node.op == "call_function":
            given = [_told(value) for value in node.args]
            given += [f"{name}={_told(value)}" for name, value in node.kwargs.items()]
            yield f"{node.name} = {short_name(node)}({', '.join(given)}): {shape_of(node)}"
    yield from (f"fetch {name} = {node}" for name, node in form.fetches.items())


def short_name(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    name = target.overloadpacket.__name__
    return name if target.namespace == "aten" else f"{target.namespace}.{name}"


def shape_of(node: fx.Node) -> str:
    """`float32[16, 10]`; sizes that depend on the batch by their names."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _told(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    return repr(value)
