# SPDX-License-Identifier: Apache-2.0
"""The forward of a program as a module, for inference."""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.static.graph.evaluation import evaluation
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form, graph_of
from fleetlight.static.graph.lookups import LOOK_UP, ROWS
from fleetlight.static.graph.state import Slot
from fleetlight.static.program import Program, names_of
from fleetlight.torch_compat.modules import children

#: feeds: their variables or names, or names with examples
Feeds = Sequence[Any] | Mapping[str, Tensor]
#: makes a module of torch alone from a layer with a table
StandIn = Callable[[nn.Module], nn.Module]
#: records in an example batch; a number that is rarely another size of a model
_BATCH = 3


def inference_module(
    program: Program, feeds: Feeds, fetches: Sequence[Any], stand_in: StandIn | None = None
) -> nn.Module:
    """A module whose forward takes the feeds, in this order, and returns the fetches.

    It computes as an evaluation does. Its parameters and buffers are those of the program, with the
    same names.

    Args:
        program: the program.
        feeds: the inputs, variables or names.
        fetches: the outputs, variables or names.
        stand_in: makes a module with rows from a layer whose rows are in a table.

    Returns:
        A module that returns one fetch as it is, and several as a tuple.

    Raises:
        ConfigError: the program has no such feed or fetch.
        PlanError: the program reads rows of tables, and there is no `stand_in`.

    Example:
        >>> program = fleet.static.capture(nn.Linear(4, 1), None, None, {"x": torch.zeros(2, 4)})
        >>> module = fleet.static.inference_module(program, ["x"], ["output"])
        >>> module(torch.zeros(5, 4)).shape
        torch.Size([5, 1])
    """
    form = _evaluated(program)
    if form.lookups and stand_in is None:
        raise PlanError(
            "the program reads rows of tables, which are not part of it; "
            "fleet.save_inference_model(dirname, feeds, fetches, program=program) exports both"
        )
    names = _listed(form, feeds)
    wanted = program.names_of([fetches] if isinstance(fetches, (str, Tensor)) else fetches)
    if not wanted:
        raise ConfigError("got no fetches, expected names or variables of the values to compute")
    return _Moved(form, names, wanted, stand_in).module()


def has_tables(program: Program) -> bool:
    """Whether the program reads rows of tables."""
    return bool(program.form.lookups)


def _evaluated(program: Program) -> Form:
    """The evaluation, with lookups before any pass replaced them."""
    source = program.source or program.origin
    if source is None or not program.form.lookups:
        return program.clone(for_test=True).form
    form = evaluation(source.form())
    graph, _ = form.copied()
    for node in graph.nodes:
        if node.target is LOOK_UP:
            # only training counts shows and clicks
            node.args = (*node.args[:4], None, None, *node.args[6:])
    return dataclasses.replace(form, graph=graph)


def examples_of(program: Program, feeds: Feeds) -> tuple[dict[str, Tensor], list[str]]:
    """Example inputs, and the names of those with a batch of any size.

    Other dynamic dimensions have the sizes of the given examples.
    """
    form = program.form
    given = feeds if isinstance(feeds, Mapping) else {}
    known = {feed.name: feed for feed in form.feeds}
    found = {
        name: known[name].accepted(given[name]) if name in given else _example(form, known[name])
        for name in _listed(form, feeds)
    }
    return found, [name for name in found if known[name].shape[:1] == (None,)]


def _listed(form: Form, feeds: Feeds) -> Sequence[str]:
    """The names of the feeds; an error for one that the program does not have."""
    places = _placeholders(form.graph)[len(form.state) :]
    # a feed named like a Python keyword has another name in the graph
    feed_of = {node.name: feed.name for node, feed in zip(places, form.feeds, strict=True)}
    given = names_of([feeds] if isinstance(feeds, (str, Tensor)) else feeds)
    names = [feed_of.get(name, name) for name in given]
    known = [feed.name for feed in form.feeds]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"feed {name!r} is not one of this program: {did_you_mean(name, known)}"
            )
        if list(names).count(name) > 1:
            raise ConfigError(f"feed {name!r} is listed twice")
    return names


def _example(form: Form, feed: Feed) -> Tensor:
    if None in feed.shape[1:]:
        raise ConfigError(
            f"feed {feed} has a dynamic size beside the batch, which an inference model fixes; "
            f"give an example of that size: feeds={{{feed.name!r}: tensor, ...}}"
        )
    place = _placeholders(form.graph)[len(form.state) + form.feeds.index(feed)]
    value = place.meta.get("val")
    device = value.device if isinstance(value, Tensor) else None
    return torch.zeros([size or _BATCH for size in feed.shape], dtype=feed.dtype, device=device)


class _Moved:
    """Copies the part of a graph that fetches need into a module with its state."""

    def __init__(
        self, form: Form, feeds: Sequence[str], fetches: Sequence[str], stand_in: StandIn | None
    ) -> None:
        self._form, self._stand_in = form, stand_in
        #: the name of each layer's stand-in
        self._tables: dict[nn.Module, str] = {}
        self._old = graph_of(form, fetches, ("forward",))
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._new: dict[fx.Node, fx.Node] = {}
        places = _placeholders(self._old)
        self._slots = dict(zip(places, form.state, strict=False))
        feeding = zip(form.feeds, places[len(form.state) :], strict=True)
        self._feeds = {feed.name: node for feed, node in feeding}
        self._refuse_missing(feeds, fetches)
        for name in feeds:
            node = self._feeds[name]
            self._new[node] = self._graph.create_node("placeholder", _argument(name, node))
            self._new[node].meta = dict(node.meta)

    def module(self) -> nn.Module:
        """The module with all nodes and tensors."""
        for node, slot in self._slots.items():
            if any(user.target is not LOOK_UP for user in node.users):
                self._new[node] = self._graph.get_attr(_place(self._root, slot))
        for node in self._old.nodes:
            if node.target is LOOK_UP:
                self._new[node] = self._looked_up(node)
            elif node.op == "call_function":
                self._new[node] = self._graph.node_copy(node, self._new.__getitem__)
        wanted: Any = self._old.output_node().args[0]
        outputs = [self._new[node] for node in wanted]
        self._graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        return fx.GraphModule(self._root, self._graph, "InferenceModule")

    def _looked_up(self, node: fx.Node) -> fx.Node:
        """Call a module that has the rows."""
        layer = self._form.lookups[node.args[6]].layer  # type: ignore[index]  # its number
        if layer not in self._tables:
            assert self._stand_in is not None
            name = f"table_{len(self._tables)}"
            while hasattr(self._root, name):
                name += "_"
            self._tables[layer] = name
            self._root.add_module(name, self._stand_in(layer))
        # the ids; for bags also offsets and per-sample weights
        given = node.args[1:2] if node.args[7] == ROWS else node.args[1:4]
        args = fx.map_arg(given, self._new.__getitem__)
        made = self._graph.call_module(self._tables[layer], tuple(args))
        made.meta = dict(node.meta)
        return made

    def _refuse_missing(self, feeds: Sequence[str], fetches: Sequence[str]) -> None:
        for name, node in self._feeds.items():
            if node.users and name not in feeds:
                raise ConfigError(
                    f"fetches {', '.join(fetches)} are computed from the feed {name!r}, which is "
                    "not among the feeds of the inference model: "
                    f"{', '.join(feeds) or 'none'}; list it, or fetch values that do not need it"
                )


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _argument(feed: str, node: fx.Node) -> str:
    """The feed's own name if it is a valid argument name."""
    return feed if feed.isidentifier() and not keyword.iskeyword(feed) else node.name


def _place(root: nn.Module, slot: Slot) -> str:
    """Add a tensor to a module under its dotted name; return the name."""
    slot.refresh()
    tensor, (*path, last) = slot.tensor, slot.name.split(".")
    module = root
    for name in path:
        if name not in children(module):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    if slot.kind != "parameter":
        module.register_buffer(last, tensor)
    elif isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return slot.name
