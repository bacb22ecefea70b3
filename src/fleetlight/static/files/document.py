# SPDX-License-Identifier: Apache-2.0
"""A form as plain data and back. Equal programs give equal data, in every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, fx, nn

from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.static.files.arguments import named, pack, unpack
from fleetlight.static.files.operations import name_of, operation
from fleetlight.static.files.values import fill_in
from fleetlight.static.graph.feeds import Feed, Limit
from fleetlight.static.graph.form import Form, Sizes, plain
from fleetlight.static.graph.schedule import Schedule
from fleetlight.static.graph.state import Kind, Slot
from fleetlight.static.writing.recorder import Part
from fleetlight.torch_compat.fakes import hint

#: why programs with tables or servers have no files of their own
ON_SERVERS = (
    "parameter servers make the steps of this program and have the rows of its tables, so its "
    "files would lack them; save all with fleet.save_persistables(dirname), for the "
    "same script to load, or the model with fleet.save_inference_model(dirname, inputs)"
)


class SlotEntry(msgspec.Struct, frozen=True):
    """A tensor of the state; its values are in the file of the state under `tensor`."""

    node: str
    kind: Kind
    name: str
    tensor: str
    device: str
    strides: list[int]
    trains: bool


class LimitEntry(msgspec.Struct, frozen=True):
    """The sizes that a dynamic dimension of a feed may have."""

    least: int
    most: int | None
    never: list[int]


class FeedEntry(msgspec.Struct, frozen=True):
    """A feed, with the sizes and strides of its example."""

    node: str
    name: str
    dtype: str
    shape: list[int | None]
    ties: list[str | None]
    limits: list[LimitEntry]
    device: str
    sizes: list[int]
    strides: list[int]


class NodeEntry(msgspec.Struct, frozen=True):
    """An operation; `value` describes its result, for readers and for a check at load."""

    name: str
    operation: str
    args: list[Any]
    kwargs: dict[str, Any]
    part: Part
    module: str
    value: str


class Document(msgspec.Struct, frozen=True):
    """A program without the values of its state."""

    state: list[SlotEntry]
    feeds: list[FeedEntry]
    operations: list[NodeEntry]
    fetches: dict[str, str]
    reports: list[str]
    schedule: Schedule


def describe(form: Form) -> tuple[Document, dict[str, Tensor]]:
    """The form as plain data, and the tensors of its state by their names in a file."""
    if form.lookups or form.split:
        raise CheckpointError(ON_SERVERS)
    sizes = Sizes(form)
    nodes = list(form.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    tensors: dict[str, Tensor] = {}
    document = Document(
        [_slot(slot, node, tensors) for slot, node in zip(form.state, inputs, strict=False)],
        [
            _feed(feed, node, sizes)
            for feed, node in zip(form.feeds, inputs[len(form.state) :], strict=True)
        ],
        [_node(node, sizes) for node in nodes if node.op != "placeholder"],
        dict(form.fetches),
        list(form.reports),
        form.schedule,
    )
    return document, tensors


def _slot(slot: Slot, node: fx.Node, tensors: dict[str, Tensor]) -> SlotEntry:
    slot.refresh()
    key, tensor = str(slot), slot.tensor.detach()
    if slot.kind == "weight":
        # the weight of the last batch does not apply to the next one
        tensor = torch.ones_like(tensor)
    while key in tensors:
        key += "'"
    tensors[key] = tensor
    place, strides = str(tensor.device), list(tensor.stride())
    trains = slot.tensor.requires_grad
    return SlotEntry(node.name, slot.kind, slot.name, key, place, strides, trains)


def _feed(feed: Feed, node: fx.Node, sizes: Sizes) -> FeedEntry:
    value: Tensor = node.meta["val"]
    # torch's own names of sizes depend on earlier work of the process
    ties = [t and sizes.text(size) for t, size in zip(feed.ties, value.shape, strict=False)]
    return FeedEntry(
        node.name,
        feed.name,
        plain(feed.dtype),
        list(feed.shape),
        ties,
        [LimitEntry(limit.least, limit.most, sorted(limit.never)) for limit in feed.limits],
        str(value.device),
        list(map(_example, value.shape)),
        list(map(_example, value.stride())),
    )


def _example(size: Any) -> int:
    """The example value of a size."""
    return hint(size)


def _node(node: fx.Node, sizes: Sizes) -> NodeEntry:
    if node.op != "call_function":
        raise CheckpointError(f"{node.name} is a {node.op}, expected calls of functions only")
    try:
        return NodeEntry(
            node.name,
            name_of(node.target),
            [pack(value, lambda n: n.name) for value in node.args],
            {name: pack(value, lambda n: n.name) for name, value in node.kwargs.items()},
            cast(Part, node.meta.get("part") or "forward"),
            node.meta.get("module") or "",
            sizes.value(node.meta.get("val")),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{node.name}: {error}") from error


def form_of(
    document: Document, tensors: Mapping[str, Tensor], device: torch.device | None = None
) -> Form:
    """The form of a document, on `device` or on the saved devices."""
    nodes: dict[str, fx.Node] = {}
    graph = fx.Graph()
    for name in [*(slot.node for slot in document.state), *(feed.node for feed in document.feeds)]:
        _add(nodes, name, _input(graph, name))
    for number, entry in enumerate(document.operations):
        with _naming_operation(number, entry.name):
            _add(nodes, entry.name, _made(graph, entry, nodes, device))
    state = tuple(_slot_of(entry, tensors, device) for entry in document.state)
    feeds = tuple(_feed_of(entry) for entry in document.feeds)
    examples = [_example_of(entry, device) for entry in document.feeds]
    fill_in(graph, [slot.tensor for slot in state], feeds, examples)
    fetches = {name: _node_of(nodes, name, node) for name, node in document.fetches.items()}
    form = Form(graph, state, feeds, fetches, tuple(document.reports), document.schedule)
    _compare(document, form, nodes)
    return form


def _add(nodes: dict[str, fx.Node], name: str, node: fx.Node) -> None:
    if name in nodes:
        raise CorruptCheckpointError(f"two values have the name {name!r}")
    nodes[name] = node


def _input(graph: fx.Graph, name: str) -> fx.Node:
    node = graph.create_node("placeholder", "", name=name)
    # the name becomes code, so take the one that torch has made valid
    node.target = node.name
    return node


def _made(
    graph: fx.Graph, entry: NodeEntry, nodes: Mapping[str, fx.Node], device: torch.device | None
) -> fx.Node:
    target = operation(entry.operation)
    for name in entry.kwargs:
        # the name becomes code
        if not name.isidentifier():
            raise CorruptCheckpointError(f"{name!r} is not a valid name of an argument")
    args = tuple(unpack(value, nodes, device) for value in entry.args)
    kwargs = {name: unpack(value, nodes, device) for name, value in entry.kwargs.items()}
    node = graph.create_node("call_function", target, args, kwargs, entry.name)
    node.meta["part"], node.meta["module"] = entry.part, entry.module
    return node


@contextlib.contextmanager
def _naming_operation(number: int, name: str) -> Iterator[None]:
    """Name the operation in errors."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"operation {number} ({name}): {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"operation {number} ({name}) is damaged: {error}") from error


def _slot_of(entry: SlotEntry, tensors: Mapping[str, Tensor], device: torch.device | None) -> Slot:
    if entry.tensor not in tensors:
        raise CorruptCheckpointError(f"the state has no tensor {entry.tensor!r}")
    saved = tensors[entry.tensor]
    tensor = torch.empty_strided(
        saved.shape,
        _writable(saved, entry.strides),
        dtype=saved.dtype,
        device=device or entry.device,
    ).copy_(saved)
    if entry.kind == "parameter":
        tensor = nn.Parameter(tensor, requires_grad=entry.trains)
    return Slot(entry.kind, entry.name, tensor)


def _writable(saved: Tensor, strides: Sequence[int]) -> Sequence[int]:
    """The saved strides, unless elements share memory."""
    return saved.stride() if 0 in strides else strides


def _feed_of(entry: FeedEntry) -> Feed:
    dtype = named("dtype", entry.dtype)
    limits = tuple(Limit(one.least, one.most, frozenset(one.never)) for one in entry.limits)
    return Feed(entry.name, tuple(entry.shape), dtype, tuple(entry.ties), limits)


def _example_of(entry: FeedEntry, device: torch.device | None) -> Tensor:
    return torch.empty_strided(
        entry.sizes, entry.strides, dtype=named("dtype", entry.dtype), device=device or entry.device
    )


def _node_of(nodes: Mapping[str, fx.Node], name: str, node: str) -> str:
    if node not in nodes:
        raise CorruptCheckpointError(f"fetch {name!r} names the value {node!r}, which is missing")
    return nodes[node].name


def _compare(document: Document, form: Form, nodes: Mapping[str, fx.Node]) -> None:
    """Refuse a program whose operations have other results with this torch."""
    sizes = Sizes(form)
    for number, entry in enumerate(document.operations):
        value = nodes[entry.name].meta.get("val")
        if entry.value and isinstance(value, Tensor) and sizes.value(value) != entry.value:
            raise CheckpointError(
                f"operation {number} ({entry.name}) returns {sizes.value(value)} with torch "
                f"{torch.__version__}, but returned {entry.value} when the program was saved"
            )
