# SPDX-License-Identifier: Apache-2.0
"""Calls of modules by a program: inside of one, its parameters and buffers are variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from fleetlight.static.recorder import Recorder
from fleetlight.static.variable import has_variable, writer_of

_call = nn.Module.__call__


class Modules:
    """The modules that a program has called, from the outside."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.calls = self.call
        #: in the order of their first calls
        self.outermost: list[nn.Module] = []
        self._paths: dict[int, str] = {}

    @property
    def root(self) -> nn.Module:
        """One module that has them all; its names are those of the state."""
        owned = {id(p) for module in self.outermost for p in module.parameters()}
        loose = [
            entry.slot.tensor
            for key, entry in self._recorder.entries.items()
            if entry.slot.kind == "parameter" and key not in owned
        ]
        if len(self.outermost) == 1 and not loose:
            return self.outermost[0]
        root = nn.Module()
        for number, module in enumerate(self.outermost):
            root.add_module(f"{type(module).__name__.lower()}_{number}", module)
        for number, tensor in enumerate(loose):
            assert isinstance(tensor, nn.Parameter)
            root.register_parameter(f"parameter_{number}", tensor)
        return root

    def name_state(self, root: nn.Module) -> None:
        """Give each tensor of the state the name that it has in a checkpoint of `root`."""
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
        """A call of a module, with variables in place of its state."""
        path = self._paths.get(id(module))
        modules = self._recorder.modules
        if modules:
            with _pushed(modules, path if path is not None else modules[-1]):
                return call()
        self._know(module)
        with (
            _pushed(modules, type(module).__name__),
            self._recorder.writing(),
            _reparametrize_module(module, self._state_of(module)),
        ):
            return call()

    def _know(self, module: nn.Module) -> None:
        if any(module is known for known in self.outermost):
            return
        self.outermost.append(module)
        for path, part in module.named_modules():
            self._paths.setdefault(id(part), path)

    def _state_of(self, module: nn.Module) -> Any:
        """By all names of it: a tensor may have several."""
        state = self._recorder.state
        parameters = module.named_parameters(remove_duplicate=False)
        buffers = module.named_buffers(remove_duplicate=False)
        return {
            **{name: state("parameter", "", tensor) for name, tensor in parameters},
            **{name: state("buffer", "", tensor) for name, tensor in buffers},
        }


@contextlib.contextmanager
def _pushed(modules: list[str], path: str) -> Iterator[None]:
    modules.append(path)
    try:
        yield
    finally:
        modules.pop()


def watch() -> None:
    """From now on a call of a module with variables is a call by their program."""
    nn.Module.__call__ = _watching  # type: ignore[method-assign]


def unwatch() -> None:
    """Modules are called as torch calls them."""
    nn.Module.__call__ = _call  # type: ignore[method-assign]


@functools.wraps(_call)
def _watching(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not has_variable((args, kwargs)):
        return _call(module, *args, **kwargs)
    writer = writer_of((args, kwargs))
    assert isinstance(writer, Recorder)
    return writer.calls(module, lambda: _call(module, *args, **kwargs))
