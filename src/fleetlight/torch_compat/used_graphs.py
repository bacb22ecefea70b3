# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a loss has gone through backward.

Why: no public name says so. A second backward fails only where the graph was not retained, and only
at a node that has freed its saved tensors, after it has added to some gradients. So this file uses
two signs. It wraps `torch.autograd.backward`, which `Tensor.backward` calls, and marks the nodes
where a backward begins. For other ways it looks for freed saved tensors. Where torch lacks
`SavedTensor.data`, it unpacks the saved tensor, which calls its hooks.
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
#: nodes to mark in a retained graph, so that `(loss / k).backward()` counts for `loss`
_REACH = 32

_plain = torch.autograd.backward
_count = 0
#: called before each backward
_listeners: list[Callable[[Any], None]] = []
#: called before and after each backward
_clock: tuple[Callable[[], int], Callable[[int], None]] | None = None


@functools.wraps(_plain)
def _watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
    for listener in list(_listeners):
        listener(tensors)
    if _clock is None:
        _plain(tensors, *args, **kwargs)
    else:
        enter, leave = _clock
        before = enter()
        try:
            _plain(tensors, *args, **kwargs)
        finally:
            leave(before)
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    inputs = given.get("inputs")
    if inputs is not None and not any(isinstance(one, nn.Parameter) for one in _listed(inputs)):
        return  # no parameter got a gradient
    global _count
    _count += 1
    retains = given.get("retain_graph")
    is_kept = given.get("create_graph") if retains is None else retains
    roots = [one.grad_fn for one in _listed(tensors) if isinstance(one, Tensor)]
    _mark(filter(None, roots), _REACH if is_kept else len(roots))


#: the arguments of `torch.autograd.backward` after the tensors
_NAMES = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def _mark(roots: Iterable[Any], most: int) -> None:
    """Mark the nodes nearest to the roots."""
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
    """Call a listener with the tensors of each backward; returns a function that ends this."""
    watch_backwards()
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def time_backwards(enter: Callable[[], int] | None, leave: Callable[[int], None]) -> None:
    """Call `enter` before each backward, and `leave` with its result after it; None ends this."""
    global _clock
    _clock = None if enter is None else (enter, leave)


def watch_backwards() -> None:
    """Wrap `torch.autograd.backward` to mark nodes."""
    global _plain
    if torch.autograd.backward is not _watched:
        _plain, torch.autograd.backward = torch.autograd.backward, _watched


def watch_no_longer() -> None:
    """Put torch's own backward back, unless other code has replaced the wrapper."""
    if torch.autograd.backward is _watched:
        torch.autograd.backward = _plain


def backwards_so_far() -> int:
    """The number of watched backwards."""
    return _count


def has_gone_backward(loss: Tensor) -> int:
    """The number of the last watched backward that began at a loss or close above it; 0: none."""
    node: Any = loss.grad_fn
    return 0 if node is None else int(node.metadata.get(_MARK, 0))


def is_used(loss: Tensor) -> bool:
    """True after a `loss.backward()` that did not retain the graph.

    Looks at the nearest node that saves tensors. False for graphs that save none, such as that of a
    plain sum of parameters.
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
    """The number of nodes that this thread's graphs have had."""
    count: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return count


def is_older(loss: Tensor, nodes: int) -> bool:
    """True for a loss from this thread that is older than this result of `nodes_so_far`."""
    return loss.grad_fn is not None and loss.grad_fn._sequence_nr() < nodes


def _state(node: Any) -> bool | None:
    """True where saved tensors are freed, False where they exist, None where it saves none."""
    try:
        if hasattr(type(node), "_raw_saved_tensors"):  # a torch.autograd.Function
            return False if node._raw_saved_tensors else None
        names = [name for name in dir(node) if name.startswith(_RAW)]
        return _state_of_saved(node, names)
    except RuntimeError:
        return True


def _state_of_saved(node: Any, names: list[str]) -> bool | None:
    """As `_state`, for torch's own nodes; raises RuntimeError where saved tensors are freed."""
    for raw in names:
        found = getattr(node, raw)
        for saved in found if isinstance(found, (tuple, list)) else [found]:
            # a saved tensor, with or without hooks; hooks may compute a forward again
            if any(getattr(saved, name, None) is not None for name in ("data", "unpack_hook")):
                return False
    for name in names:
        # returns None for an optional tensor that was not given
        getattr(node, "_saved_" + name.removeprefix(_RAW))
    return None
