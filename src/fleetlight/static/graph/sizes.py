# SPDX-License-Identifier: Apache-2.0
"""Sizes that are known only when a program runs, by names that are the same in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.static.graph.form import Form


class Sizes:
    """The sizes of one program.

    `batch` is the first dimension of the first feed where that is open; `x_1` is what dimension 1
    of feed `x` has. Others are computed from these, `5*batch`. torch's own names, `s26`, depend on
    what the process did before.
    """

    def __init__(self, form: Form) -> None:
        self._symbols: dict[Any, Any] = {}
        self._texts: dict[Any, str] = {}
        inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
        for feed, node in zip(form.feeds, inputs[len(form.state) :], strict=True):
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                self._name(feed.name, value.shape)
        for slot, node in zip(form.state, inputs, strict=False):
            if slot.kind == "pulled" and isinstance(node.meta.get("val"), Tensor):
                self._name(slot.name.replace(" ", "_"), node.meta["val"].shape)

    def _name(self, feed: str, shape: Sequence[Any]) -> None:
        for dim, size in enumerate(shape):
            for symbol in _symbols_of(size):
                if symbol not in self._symbols:
                    is_batch = dim == 0 and not self._symbols
                    name = "batch" if is_batch else f"{feed}_{dim}"
                    self._symbols[symbol] = type(symbol)(name, **symbol.assumptions0)

    def text(self, size: int | torch.SymInt) -> str:
        """`batch`, `5*batch`, or a number."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression = size.node.expr
        if expression not in self._texts:
            self._texts[expression] = str(expression.xreplace(self._symbols))
        return self._texts[expression]

    def value(self, value: Any) -> str:
        """What a node makes: `float32[batch, 10]`, a size, or several of these in brackets."""
        if isinstance(value, Tensor):
            return f"{plain(value.dtype)}[{', '.join(map(self.text, value.shape))}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self.value, value))})"
        if isinstance(value, Mapping):
            return f"({', '.join(map(self.value, value.values()))})"
        return self.text(value) if isinstance(value, (int, torch.SymInt)) else ""


def plain(kind: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(kind).removeprefix("torch.")


def _symbols_of(size: Any) -> list[Any]:
    if not isinstance(size, torch.SymInt):
        return []
    return sorted(size.node.expr.free_symbols, key=str)
