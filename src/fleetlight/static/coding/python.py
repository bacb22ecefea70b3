# SPDX-License-Identifier: Apache-2.0
"""A graph as a Python function with one line for each node."""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from fleetlight.errors import PlanError
from fleetlight.static.coding.callables import callable_of

_numbers = itertools.count(1)
#: types whose `repr` is Python code
_PLAIN = (int, bool, str, type(None))


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """A function from the graph's inputs to its outputs.

    Each value is deleted after the last line that uses it.
    """
    source = _Source(graph)
    text = "\n".join(source.lines())
    # so that a traceback shows the line
    file = f"<program {next(_numbers)}>"
    exec(compile(text, file, "exec"), source.known)
    function: Callable[..., Any] = source.known.pop("run")
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(function, linecache.cache.pop, file, None).atexit = False
    return function


def _ends(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[str]]:
    """The values whose last use is each node, without inputs, which the caller holds."""
    last = {used: node for node in nodes for used in node.all_input_nodes}
    ends: dict[fx.Node, list[str]] = {}
    for used, node in last.items():
        if used.op != "placeholder":
            ends.setdefault(node, []).append(used.name)
    return ends


class _Source:
    """The Python source of a graph, and its globals."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        #: the globals of the source
        self.known: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._taken = {node.name for node in graph.nodes} | {"run", "slice"}

    def lines(self) -> Iterator[str]:
        """The function, line by line."""
        nodes = list(self._graph.nodes)
        ends = _ends(nodes)
        yield f"def run({', '.join(n.name for n in nodes if n.op == 'placeholder')}):"
        for node in nodes:
            if node.op == "output":
                yield f"    return {self._value(node.args[0])}"
            elif node.op == "call_function":
                yield f"    {self._call(node)}"
                if node in ends:
                    yield f"    del {', '.join(ends[node])}"
            elif node.op != "placeholder":
                raise PlanError(f"no code for {node.op} {node.target!r} of a program")

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem and node.users:
            whole, place = map(self._value, node.args)
            return f"{node.name} = {whole}[{place}]"
        given = [self._value(value) for value in node.args]
        given += [f"{name}={self._value(value)}" for name, value in node.kwargs.items()]
        call = f"{self._name(callable_of(node.target), str(node.target))}({', '.join(given)})"
        return f"{node.name} = {call}" if node.users else call

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._value(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, slice):
            return f"slice{self._value((value.start, value.stop, value.step))}"
        if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._name(value, str(value))

    def _name(self, value: Any, wanted: str) -> str:
        """The name of an object in the source: `wanted` if it is free."""
        if id(value) not in self._names:
            plain = "".join(c if c.isalnum() else "_" for c in wanted.removesuffix(".default"))
            name = plain = f"_{plain}" if not plain[:1].isalpha() else plain
            for number in itertools.count(2):
                if name not in self._taken:
                    break
                name = f"{plain}_{number}"
            self._taken.add(name)
            self._names[id(value)], self.known[name] = name, value
        return self._names[id(value)]
