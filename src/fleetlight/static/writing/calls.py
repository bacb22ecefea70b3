# SPDX-License-Identifier: Apache-2.0
"""Calls of modules by a program: during a call, parameters and buffers are variables."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fleetlight.errors import PlanError
from fleetlight.static.graph.variable import has_variable, writer_of
from fleetlight.static.writing import tables
from fleetlight.static.writing.recorder import Recorder
from fleetlight.torch_compat.modules import buffers, parameters, with_tensors

#: these modules pass the flag to known functions
_KNOWN = "torch.nn.modules."


class _Training:
    """Replaces `training` of all modules while a program calls one."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        value = module.__dict__.get("training", True)
        if value and not type(module).__module__.startswith(_KNOWN):
            self._read()
        return value

    def __set__(self, module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value


@contextlib.contextmanager
def watched_training(recorder: Recorder) -> Iterator[None]:
    """Inside the block, reads of `self.training` are noted.

    Only for the call of a module that a program records: torch has no hook for reads of the flag.
    """
    if "training" in nn.Module.__dict__:
        # a program is written while another one is
        yield
        return
    nn.Module.training = _Training(recorder.flag_read)  # type: ignore[assignment]
    try:
        yield
        recorder.mark_flag_read()
    finally:
        del nn.Module.training


_call = nn.Module.__call__


class CalledModules:
    """The outermost modules that a program has called."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.calls = self.call
        #: in the order of their first calls
        self.outermost: list[nn.Module] = []
        self._paths: dict[int, str] = {}
        #: the root, with the modules and parameters for which it was found
        self._root: tuple[tuple[int, ...], nn.Module] | None = None

    @property
    def root(self) -> nn.Module:
        """A module that contains them all; its names are those of the state."""
        loose = self._loose()
        key = (len(self.outermost), *map(id, loose))
        if self._root is None or self._root[0] != key:
            self._root = key, self._find_root(loose)
        return self._root[1]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of called modules, and those used outside any module."""
        found = [p for module in self.outermost for p in module.parameters()] + self._loose()
        return list(dict.fromkeys(found))

    def _loose(self) -> list[nn.Parameter]:
        """Parameters that were used outside any call of a module."""
        owned = {id(p) for module in self.outermost for p in module.parameters()}
        loose = (
            entry.slot.tensor
            for key, entry in self._recorder.entries.items()
            if entry.slot.kind == "parameter" and key not in owned
        )
        return [tensor for tensor in loose if isinstance(tensor, nn.Parameter)]

    def _find_root(self, loose: list[nn.Parameter]) -> nn.Module:
        if len(self.outermost) == 1 and not loose:
            return self.outermost[0]
        owner = owner_of(self.outermost, loose) if self.outermost or loose else None
        if owner is not None:
            return owner
        root = NamelessRoot()
        for name, part in self._numbered(loose).items():
            if isinstance(part, nn.Module):
                root.add_module(name, part)
            else:
                root.register_parameter(name, part)
        return root

    def _numbered(self, loose: list[nn.Parameter]) -> dict[str, nn.Module | nn.Parameter]:
        """The called modules and loose parameters, by numbered names."""
        modules = {_short_name(module, n): module for n, module in enumerate(self.outermost)}
        return {**modules, **{f"parameter_{n}": tensor for n, tensor in enumerate(loose)}}

    def name_state(self, root: nn.Module) -> None:
        """Name each tensor of the state as in a checkpoint of `root`."""
        tensors: dict[str, Tensor] = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        names = {id(tensor): name for name, tensor in tensors.items()}
        numbers = dict.fromkeys(("parameter", "buffer", "constant"), 0)
        for key, entry in self._recorder.entries.items():
            slot = entry.slot
            if key in names:
                slot.name = names[key]
            elif slot.kind in numbers and not slot.name:
                slot.name = f"{slot.kind}_{numbers[slot.kind]}"
                numbers[slot.kind] += 1

    def call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Call a module with variables instead of its state."""
        path = self._paths.get(id(module))
        recorder = self._recorder
        if recorder.modules:
            with recorder.calling(recorder.modules[-1].path if path is None else path):
                return call()
        self._know(module)
        before = self._state_of(module)
        after = dict(before)
        with recorder.calling(type(module).__name__), watched(), recorder.writing():
            with (
                watched_training(recorder),
                with_tensors(module, after),
                tables.written(module, recorder.lookups),
            ):
                out = call()
            _keep_changed(before, after)
        return out

    def _know(self, module: nn.Module) -> None:
        if any(module is known for known in self.outermost):
            return
        # parts of a second module may have the names of parts of the first
        prefix = f"{_short_name(module, len(self.outermost))}." if self.outermost else ""
        self.outermost.append(module)
        for path, part in module.named_modules():
            self._paths.setdefault(id(part), f"{prefix}{path}")

    def _state_of(self, module: nn.Module) -> Any:
        """The variables of a module's state by all their names, since modules may share a tensor.

        A module with two paths is listed once: torch restores names in order, so a second
        name of the same tensor would be restored to the variable.
        """
        state = self._recorder.state
        places = [(f"{path}." if path else "", part) for path, part in module.named_modules()]
        parameters = [
            (prefix + name, tensor)
            for prefix, part in places
            for name, tensor in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        buffers = [
            (prefix + name, tensor)
            for prefix, part in places
            for name, tensor in part.named_buffers(recurse=False, remove_duplicate=False)
        ]
        lazy = [name for name, tensor in parameters if is_lazy(tensor)]
        if lazy:
            raise PlanError(
                f"{lazy[0]} has no shape yet; call the model once with a batch before the program"
            )
        variables = {
            **{name: state("parameter", "", tensor) for name, tensor in parameters},
            **{name: state("buffer", "", tensor) for name, tensor in buffers},
        }
        self._place(module)
        return variables

    def _place(self, module: nn.Module) -> None:
        """Note the places of the state in modules, which the script may change."""
        entries = self._recorder.entries
        for part in module.modules():
            for place in (parameters(part), buffers(part)):
                for name, tensor in place.items():
                    if tensor is not None and id(tensor) in entries:
                        entries[id(tensor)].slot.add_place(place, name)


def _keep_changed(before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Copy buffers that the forward has replaced (`self.mean = ...`) into the original tensors."""
    for name, was in before.items():
        now = after[name]
        if now is was:
            continue
        if not isinstance(now, Tensor) or now.shape != was.shape:
            raise PlanError(
                f"the forward has replaced {name}; expected a tensor of "
                f"shape {list(was.shape)}, since a program changes its state in place"
            )
        with torch.no_grad():
            was.copy_(now)


def _short_name(module: nn.Module, number: int) -> str:
    return f"{type(module).__name__.lower()}_{number}"


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside the block, programs record calls of modules, including inner ones."""
    before = nn.Module.__call__
    watch()
    try:
        yield
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def watch() -> None:
    """Let programs record calls of modules with variables.

    As torch.fx does while it traces: a global hook of torch cannot replace parameters for a call.
    """
    nn.Module.__call__ = _watching  # type: ignore[method-assign]


def unwatch() -> None:
    """Restore torch's own call of modules."""
    if nn.Module.__call__ is not _call:
        # assigning it costs tens of microseconds: Python then drops its caches for all modules
        nn.Module.__call__ = _call  # type: ignore[method-assign]


@functools.wraps(_call)
def _watching(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not has_variable((args, kwargs)):
        return _call(module, *args, **kwargs)
    writer = writer_of((args, kwargs))
    assert isinstance(writer, Recorder)
    return writer.calls(module, lambda: _call(module, *args, **kwargs))


class NamelessRoot(nn.Module):
    """Contains the modules of a program that no module of the script contains together."""


def owner_of(modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module | None:
    """The smallest module that contains all of these, or None without a unique one."""
    holders = [one for one in _live_modules() if _holds(one, modules, parameters)]
    for one in holders:
        if all(_holds(other, [one], ()) for other in holders):
            return one
    return None


def _live_modules() -> list[nn.Module]:
    """All modules of the process, by `type()`, since an object may compute `__class__`."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), nn.Module) and not issubclass(type(one), NamelessRoot)
    ]


def _holds(holder: nn.Module, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> bool:
    # a module that is only partly constructed has no children
    if not holder.__dict__.get("_modules") and holder not in modules:
        return False
    inside = {id(module) for module in holder.modules()}
    if not all(id(module) in inside for module in modules):
        return False
    own = {id(parameter) for parameter in holder.parameters()} if parameters else set()
    return all(id(parameter) in own for parameter in parameters)
