# SPDX-License-Identifier: Apache-2.0
"""Whether backward of a loss has been done.

Why: no public name tells it. A second backward is an error only where the graph was not retained,
and only once it comes to a node that has let go of what it had saved, when it has added to some
gradients already. So there are two ways to know. `torch.autograd.backward`, which `Tensor.backward`
calls, is watched, and leaves a mark at the nodes where a backward has begun. What went backward by
another way is known by what its graph has let go of. Where torch lacks `SavedTensor.data`, the
saved tensor is unpacked instead, which calls its hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_RAW = "_raw_saved_"
#: in the metadata of a node: the number of the last backward that began there
_MARK = "fleetlight.backward"
#: how many nodes are marked where the graph is retained: `(loss / k).backward()` is one of `loss`
_REACH = 32

_plain = torch.autograd.backward
_count = 0
#: who else wants to know of each backward, before it begins
_listeners: list[Callable[[Any], None]] = []


@functools.wraps(_plain)
def _watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
    for listener in list(_listeners):
        listener(tensors)
    _plain(tensors, *args, **kwargs)
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    inputs = given.get("inputs")
    if inputs is not None and not any(isinstance(one, nn.Parameter) for one in _listed(inputs)):
        return  # no parameter has got anything
    global _count
    _count += 1
    retains = given.get("retain_graph")
    is_kept = given.get("create_graph") if retains is None else retains
    roots = [one.grad_fn for one in _listed(tensors) if isinstance(one, Tensor)]
    _mark(filter(None, roots), _REACH if is_kept else len(roots))


#: what `torch.autograd.backward` is given behind the tensors
_NAMES = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def _mark(roots: Iterable[Any], most: int) -> None:
    """Those nearest to the roots."""
    nodes = list(dict.fromkeys(roots))
    for place in range(most):
        if place == len(nodes):
            return
        node = nodes[place]
        node.metadata[_MARK] = _count
        if len(nodes) < most:
            found = (n for n, _ in node.next_functions if n is not None and n not in nodes)
            nodes += dict.fromkeys(found)


def listen_to_backwards(listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call it with what each backward begins at; returns what ends that."""
    watch_backwards()
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def watch_backwards() -> None:
    """From now on a backward leaves its mark."""
    global _plain
    if torch.autograd.backward is not _watched:
        _plain, torch.autograd.backward = torch.autograd.backward, _watched


def watch_no_longer() -> None:
    """Backward is torch's own again, unless somebody else has put another one there."""
    if torch.autograd.backward is _watched:
        torch.autograd.backward = _plain


def backwards_so_far() -> int:
    """How many backwards have been watched."""
    return _count


def has_gone_backward(loss: Tensor) -> int:
    """The number of the last watched backward that began at a loss or close above it; 0: none."""
    node: Any = loss.grad_fn
    return 0 if node is None else int(node.metadata.get(_MARK, 0))


def is_used(loss: Tensor) -> bool:
    """True behind a `loss.backward()` that did not retain the graph.

    Looks at the node nearest to the loss that saves tensors. Graphs that save none, such as that
    of a plain sum of parameters, tell nothing: False.
    """
    layer = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(layer)
    while layer:
        states = [state for node in layer if (state := _state(node)) is not None]
        if states:
            return any(states)
        layer = [
            node for one in layer for node, _ in one.next_functions if node and node not in seen
        ]
        layer = list(dict.fromkeys(layer))
        seen.update(layer)
    return False


def nodes_so_far() -> int:
    """How many nodes this thread's graphs have had so far."""
    count: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return count


def is_older(loss: Tensor, nodes: int) -> bool:
    """True for a loss that was computed on this thread before `nodes_so_far` answered that."""
    return loss.grad_fn is not None and loss.grad_fn._sequence_nr() < nodes


def _state(node: Any) -> bool | None:
    """True where what it saved is gone, False where it is there, None where it saves nothing."""
    try:
        if hasattr(type(node), "_raw_saved_tensors"):  # a torch.autograd.Function
            return False if node._raw_saved_tensors else None
        names = [name for name in dir(node) if name.startswith(_RAW)]
        return _state_of_saved(node, names)
    except RuntimeError:
        return True


def _state_of_saved(node: Any, names: list[str]) -> bool | None:
    """The same of a node of torch's own; raises RuntimeError where what it saved is gone."""
    for raw in names:
        found = getattr(node, raw)
        for saved in found if isinstance(found, (tuple, list)) else [found]:
            # one that has something, behind hooks or not; hooks may compute a forward again
            if any(getattr(saved, name, None) is not None for name in ("data", "unpack_hook")):
                return False
    for name in names:
        # an optional tensor that was not given answers None
        getattr(node, "_saved_" + name.removeprefix(_RAW))
    return None
