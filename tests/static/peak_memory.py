# SPDX-License-Identifier: Apache-2.0
"""The peak memory of a program's values, besides its state and its feeds."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fleetlight.static.graph.form import Form, graph_of
from fleetlight.static.running.runners import EVERYTHING


def peak_bytes(form: Form, feeds: Sequence[Tensor]) -> int:
    """The peak, if each value is freed after its last use."""
    graph = graph_of(form, ["loss"], EVERYTHING)
    given = iter([*(slot.tensor for slot in form.state), *feeds])
    last = {source: node for node in graph.nodes for source in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    outside: set[int] = set()
    most = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            outside.add(values[node].untyped_storage().data_ptr())
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            most = max(most, sum(n for at, n in _storages(values).items() if at not in outside))
            for done in [n for n in (*node.all_input_nodes, node) if last.get(n, n) is node]:
                values.pop(done, None)
    return most


def _storages(values: dict[fx.Node, Any]) -> dict[int, int]:
    return {t.data_ptr(): t.nbytes() for t in _stored(values)}


def _stored(values: dict[fx.Node, Any]) -> Iterator[Any]:
    return (v.untyped_storage() for v in tree_leaves(values) if isinstance(v, Tensor))
