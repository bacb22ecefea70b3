# SPDX-License-Identifier: Apache-2.0
"""Graphs compiled to C++ by torch's inductor, segment by segment.

Communication, random numbers and fused optimizer steps stay calls; inductor compiles the
operations between them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.observe.log import logger
from fleetlight.static.coding.buckets import keep_buckets
from fleetlight.static.coding.examples import Examples, Fit
from fleetlight.static.coding.python import function_of
from fleetlight.static.coding.segments import GraphSegment, segments
from fleetlight.static.graph.feeds import Shape
from fleetlight.torch_compat.compiler import inductor

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
