# SPDX-License-Identifier: Apache-2.0
"""Graphs compiled to C++ by torch's inductor, segment by segment.

Communication, random numbers and fused optimizer steps stay calls; inductor compiles the
operations between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.observe.log import logger
from fleetlight.static.coding.buckets import is_bucket, keep_buckets
from fleetlight.static.coding.python import function_of
from fleetlight.static.graph.aliases import is_view
from fleetlight.static.graph.feeds import Shape
from fleetlight.static.ops.marks import LAID_OUT
from fleetlight.torch_compat.compiler import inductor
from fleetlight.torch_compat.fakes import ShapeEnv, as_python, fakes_of, open_fake
from fleetlight.torch_compat.operators import OpOverload

Fit = Callable[[Sequence[Tensor]], bool]


class Examples:
    """Computed again, since nodes of a rewritten or loaded graph may lack symbolic sizes.

    `inputs` are those of a run, whose sizes become the hints; `shapes` have None for each dynamic
    size. A shape of None is a tensor of fixed shape.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Tensor], shapes: Sequence[Shape | None]
    ) -> None:
        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fakes = fakes_of(self._shapes)
        #: the input and the dimension that give a symbol its value
        self._places: dict[str, tuple[int, int]] = {}
        self._inputs = inputs
        given = [self._fake(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True)]
        for number, fake in enumerate(given):
            for dim, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    self._places[str(size.node.expr)] = number, dim
        self._found: dict[fx.Node, Any] = {}
        self._compute(graph, given)

    def of(self, node: fx.Node) -> Any:
        """The fake tensor of a node."""
        return self._found[node]

    def fit(self) -> Fit:
        """A function that checks the guards of these examples on other inputs."""
        wanted = sorted({as_python(guard.expr) for guard in self._shapes.guards})
        lines = ["def fits(inputs):"]
        lines += [f"    {name} = inputs[{i}].shape[{d}]" for name, (i, d) in self._places.items()]
        lines += [f"    return {' and '.join(f'({text})' for text in wanted) or True}"]
        known: dict[str, Any] = {"math": math}
        try:
            exec("\n".join(lines), known)
            fits: Fit = known["fits"]
            if fits(self._inputs):
                return fits
        except (SyntaxError, NameError, TypeError):
            # sympy's printer does not always write Python
            pass
        places = tuple(self._places.values())
        sizes = [self._inputs[i].shape[d] for i, d in places]
        return lambda inputs: [inputs[i].shape[d] for i, d in places] == sizes

    def _compute(self, graph: fx.Graph, given: Sequence[Tensor]) -> None:
        inputs = iter(given)
        with self.fakes, torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    self._found[node] = next(inputs)
                elif node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
                    self._found[node] = node.target(*args, **kwargs)

    def _fake(self, tensor: Tensor, shape: Shape | None) -> Tensor:
        """A fake tensor with a symbol for each dynamic size."""
        if shape is None:
            return self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        fake: Tensor = open_fake(self.fakes, tensor.detach(), [size is None for size in shape])
        return fake


#: fewer operations than these run faster as calls
_MIN_OPERATIONS = 2


@dataclasses.dataclass
class GraphSegment:
    """Consecutive nodes, their inputs, and those of them that later nodes use."""

    nodes: list[fx.Node]

    def __post_init__(self) -> None:
        self.own = frozenset(self.nodes)
        taken = (i for node in self.nodes for i in node.all_input_nodes)
        self.inputs = list(dict.fromkeys(node for node in taken if node not in self.own))
        self.outputs = [n for n in self.nodes if any(u not in self.own for u in n.users)]

    def graph(self) -> fx.Graph:
        """The segment as a graph of its own."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output([copies[node] for node in self.outputs])
        return graph


def segments(graph: fx.Graph) -> Iterator[GraphSegment]:
    """The segments of a graph, in order."""
    _bring_together(graph)
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and not stays(node):
            run.append(node)
        elif node.op != "placeholder" and run:
            yield from _worth_it(run)
            run = []


def _bring_together(graph: fx.Graph) -> None:
    """Move each `getitem` after its source, and each layout before its first user."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node.args[0].append(node)
        elif node.target is LAID_OUT:
            min(node.users).prepend(node)


def stays(node: fx.Node) -> bool:
    """Whether a node stays a call: communication, fused steps, and random numbers.

    Random numbers are then those of eager training. (inductor would call the same operations, but
    reads their in-place results too early.)
    """
    target: Any = node.target
    if target is operator.getitem:
        return stays(node.all_input_nodes[0])
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target.namespace == "aten":
        return str(target.overloadpacket.__name__).startswith("_fused_") or is_bucket(node)
    return bool(target.namespace != "prims")


def _worth_it(run: list[fx.Node]) -> Iterator[GraphSegment]:
    """The segment of a run, if it is long enough; views without users in it move after it."""
    inside = set(run)
    for node in reversed(run):
        if is_view(node) and not any(user in inside for user in node.users):
            inside.discard(node)
    nodes = [node for node in run if node in inside]
    if sum(not is_view(node) for node in nodes) >= _MIN_OPERATIONS:
        last = nodes[-1]
        for node in run:
            if node not in inside:
                last.append(node)
                last = node
        yield GraphSegment(nodes)


#: compiled versions of one graph, for different batch sizes
_VERSIONS = 4


@functools.cache
def has_compiler() -> bool:
    """Whether there is a C++ compiler; warns once if there is none."""
    try:
        inductor.find_cpp_compiler()
    except (RuntimeError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        logger.warning(
            "Executor(compile='inductor') needs a C++ compiler at run time, and there is none (%s);"
            " programs run as generated Python instead. Install g++, or name one in CXX",
            why,
        )
        return False
    return True


class Compiled:
    """The code of a graph, compiled in its first run, when the batch size is known.

    It works for other sizes unless they violate a guard. For these the graph is compiled again, a
    few times; after that they run as generated Python.
    """

    def __init__(self, graph: fx.Graph, shapes: Sequence[Shape | None]) -> None:
        self._graph, self._shapes = graph, shapes
        self._versions: list[tuple[Fit, Callable[..., Any]]] = []

    def __call__(self, *inputs: Tensor) -> Any:
        for fits, function in self._versions:
            if fits(inputs):
                return function(*inputs)
        if len(self._versions) < _VERSIONS:
            self._versions.append(_version(self._graph, inputs, self._shapes))
            return self._versions[-1][1](*inputs)
        return self._plain(*inputs)

    @functools.cached_property
    def _plain(self) -> Callable[..., Any]:
        return function_of(self._graph)


def _version(
    original: fx.Graph, inputs: Sequence[Tensor], shapes: Sequence[Shape | None]
) -> tuple[Fit, Callable[..., Any]]:
    """Code for inputs of these sizes, and the check of its guards."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(original, {}))
    with _warning(len(graph.nodes)):
        examples = Examples(graph, inputs, shapes)
        functions: list[tuple[GraphSegment, Callable[..., Any]]] = []
        for segment in segments(graph):
            with _warning(len(segment.nodes)):
                functions.append((segment, _compiled(segment, examples)))
        instead: dict[fx.Node, fx.Node] = {}
        for segment, function in functions:
            _put(graph, segment, function, instead)
        keep_buckets(graph)
        return examples.fit(), function_of(graph)
    return lambda _: True, function_of(original)


@contextlib.contextmanager
def _warning(count: int) -> Iterator[None]:
    """Keep what the compiler cannot compile as generated Python."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "inductor could not compile %d operations of a program, which run as generated Python "
            "instead: %s: %s",
            count,
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )


def _compiled(segment: GraphSegment, examples: Examples) -> Callable[..., Any]:
    module = fx.GraphModule(torch.nn.Module(), segment.graph())
    given = [examples.of(node) for node in segment.inputs]
    with torch.no_grad():
        # the executor has checked the feeds
        return inductor.compiled(module, given, examples.fakes)


def _put(
    graph: fx.Graph,
    segment: GraphSegment,
    function: Callable[..., Any],
    instead: dict[fx.Node, fx.Node],
) -> None:
    """Replace a segment by a call; `instead` maps replaced nodes to their results."""
    inputs = tuple(instead.get(node, node) for node in segment.inputs)
    with graph.inserting_after(segment.nodes[-1]):
        call = graph.call_function(function, inputs)
    last = call
    for number, old in enumerate(segment.outputs):
        with graph.inserting_after(last):
            last = instead[old] = graph.call_function(operator.getitem, (call, number))
        old.replace_all_uses_with(last, lambda user: user not in segment.own)
    for node in reversed(segment.nodes):
        graph.erase_node(node)
