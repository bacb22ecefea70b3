# SPDX-License-Identifier: Apache-2.0
"""`Form`: a program as passes see it. A pass takes a form and returns another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.static.graph.aliases import base_of, changed_by
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.lookups import Lookup, Split
from fleetlight.static.graph.schedule import Schedule
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import without_marks
from fleetlight.torch_compat.operators import OpOverload, schema

Code = Callable[..., list[Tensor]]
#: copies of nodes, by the original node
Copied = dict[fx.Node, fx.Node]
#: the argument of batch norm that says whether it trains
_TRAINS = 5


@dataclasses.dataclass(frozen=True)
class Form:
    """The graph's inputs are the state, then the feeds, both in this order.

    `meta["part"]` of a node is forward, backward, update, or reduction: the all-reduce of merged
    gradients before the update.
    """

    graph: fx.Graph
    state: tuple[Slot, ...]
    feeds: tuple[Feed, ...]
    #: the nodes of named values
    fetches: Mapping[str, str]
    #: one line of each pass about its changes
    reports: tuple[str, ...] = ()
    #: which parts run in which step
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    #: calls of layers with tables; the index is the number in their nodes
    lookups: tuple[Lookup, ...] = ()
    #: pulls before a run and pushes after it, set by `split_ps`
    split: Split | None = None
    #: names of values that it cannot compute, with the reason
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def copied(self) -> tuple[fx.Graph, Copied]:
        """A copy of the graph with the same node names, and the map of nodes."""
        copy = fx.Graph()
        nodes: Copied = {}
        copy.graph_copy(self.graph, nodes)
        return copy, nodes

    def rewritten(self, graph: fx.Graph, report: str, **changes: Any) -> Form:
        """The form with another graph, and a report of one line."""
        return dataclasses.replace(self, graph=graph, reports=(*self.reports, report), **changes)

    @functools.cached_property
    def late(self) -> frozenset[str]:
        """Names of nodes that run only when a step is made."""
        nodes = self.graph.nodes
        return frozenset(n.name for n in nodes if n.meta.get("part") in ("reduction", "update"))

    @functools.cached_property
    def trains(self) -> bool:
        """Whether it has nodes outside the forward."""
        return not all(map(in_forward, self.graph.nodes))

    @functools.cached_property
    def checks(self) -> tuple[Callable[[], None], ...]:
        """Checks before each training run; none for an evaluation."""
        if not any(node.meta.get("part") == "backward" for node in self.graph.nodes):
            return ()
        return tuple(slot.check for slot in self.state if slot.check is not None)

    def node(self, name: str) -> fx.Node:
        """The node of a fetch, a feed or a node name."""
        wanted = self.fetches.get(name) or self._inputs.get(name, name)
        node: fx.Node
        for node in self.graph.nodes:
            if node.name == wanted and isinstance(node.meta.get("val"), Tensor):
                return node
        if wanted in self.missing:
            raise PlanError(self.missing[wanted])
        shown = [*self.fetches, *self._inputs]
        known = [*shown, *(n.name for n in self.graph.nodes if n.op == "call_function")]
        raise ConfigError(
            f"fetch {name!r} is not one of this program: {did_you_mean(name, known, shown)}"
        )

    @functools.cached_property
    def _inputs(self) -> Mapping[str, str]:
        """The node name of each feed; it differs for Python keywords."""
        inputs = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        names = [feed.name for feed in self.feeds]
        return dict(zip(names, inputs[len(self.state) :], strict=True))


def in_forward(node: fx.Node) -> bool:
    """Whether a node belongs to the forward, the default."""
    return bool(node.meta.get("part", "forward") == "forward")


class RunnableProgram(Protocol):
    """The interface of `static.Program` for code and runners."""

    @property
    def form(self) -> Form:
        """The program as it will run."""

    @property
    def state(self) -> tuple[Slot, ...]:
        """The tensors that it reads and changes."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps it makes."""


class Pass(Protocol):
    """A pure function from a form to another one, which adds a line to `reports`."""

    @property
    def name(self) -> str:
        """Its name in `explain()`."""

    def __call__(self, form: Form) -> Form:
        """The form, rewritten."""


def changed_feeds(form: Form) -> frozenset[str]:
    """The feeds that the program changes in place."""
    inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
    calls = [node for node in form.graph.nodes if node.op == "call_function"]
    changed = {base_of(one) for node in calls for one in changed_by(node)}
    feeds = zip(form.feeds, inputs[len(form.state) :], strict=True)
    return frozenset(feed.name for feed, node in feeds if node in changed)


def needed_feeds(form: Form, wanted: Iterable[str]) -> tuple[str, ...]:
    """The feeds on which these values or any change of the state depend."""
    waiting = [form.node(name) for name in wanted]
    waiting += [n for n in form.graph.nodes if n.op == "call_function" and has_effect(n)]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
    feeds = zip(form.feeds, inputs[len(form.state) :], strict=True)
    for_ids = () if form.split is None else form.split.needs
    return tuple(feed.name for feed, node in feeds if node in seen or feed in for_ids)


def graph_of(form: Form, wanted: Sequence[str], parts: Iterable[str]) -> fx.Graph:
    """A graph of these values and all changes of the state by these parts, without marks."""
    copy, nodes = form.copied()
    kept = frozenset(parts)
    copy.output([_own(copy, nodes[form.node(name)]) for name in wanted])
    without_marks(copy)
    drop_unused(copy, lambda node: node.meta.get("part", "forward") not in kept)
    return copy


def _own(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The value of a node; a clone if it shares memory with state or a feed, which change."""
    if base_of(node).op != "placeholder":
        return node
    return graph.call_function(torch.ops.aten.clone.default, (node,))


def drop_unused(graph: fx.Graph, harmless: Callable[[fx.Node], bool] = lambda node: False) -> int:
    """Remove unused nodes without effects; return their number.

    Effects of `harmless` nodes do not count.
    """
    dropped = 0
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if harmless(node) or not has_effect(node):
            graph.erase_node(node)
            dropped += 1
    return dropped


def has_effect(node: fx.Node) -> bool:
    """Whether a node has an effect besides its value."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return node.op not in ("get_attr", "call_function")
    if target.namespace in ("_c10d_functional", "c10d"):
        return True
    if target.overloadpacket is torch.ops.aten.native_batch_norm:
        # in training it changes its statistics, though its schema does not say so
        return bool(node.args[_TRAINS])
    return bool(schema(target).is_mutable)


class Sizes:
    """Readable names of the sizes of one program.

    `batch` is the first dimension of the first feed if that is dynamic; `x_1` is dimension 1
    of feed `x`. Other sizes are expressions of these: `5*batch`. torch's own names, such as `s26`,
    depend on earlier work of the process.
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
        """A node's value: `float32[batch, 10]`, a size, or several of these in brackets."""
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
