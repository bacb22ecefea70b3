# SPDX-License-Identifier: Apache-2.0
"""The persistent state of a module: taken by name, and put back into the same Parameter objects."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fleetlight.checkpoint.formats.tensors import dtype_name
from fleetlight.checkpoint.formats.values import Json, pack, unpack
from fleetlight.errors import CheckpointError, counted
from fleetlight.torch_compat.modules import with_versions_of
from fleetlight.torch_compat.tensors import assign, distinct_elements, without_functions

Fact = TypeVar("Fact")


@dataclasses.dataclass(frozen=True)
class ModelState:
    """What `state_dict` would hold. The tensors are the module's own, not copies."""

    tensors: Mapping[str, Tensor]
    #: what each tensor is: parameter, buffer, or extra (from `get_extra_state`)
    kinds: Mapping[str, str]
    #: tied tensors: the second name -> the first
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: values of `get_extra_state`, packed
    extra: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Every name with its value, as `Module.load_state_dict` wants it."""
        named = {name: t for name, t in self.tensors.items() if self.kinds[name] != "extra"}
        tied = {second: self.tensors[first] for second, first in self.aliases.items()}
        extra = {name: unpack(value, self.tensors) for name, value in self.extra.items()}
        return {**named, **tied, **extra}


def model_state(module: nn.Module) -> ModelState:
    """The module's parameters, persistent buffers, extra state and which of them are tied."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Json] = {}
    first_names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if is_extra(name, value):
            extra[name] = pack(value, name, tensors)
        elif id(value) in first_names:
            aliases[name] = first_names[id(value)]
        else:
            first_names[id(value)] = name
            # a tensor of another class may make one of its own
            with without_functions():
                tensors[name] = value.detach()
            kinds[name] = "parameter" if isinstance(value, nn.Parameter) else "buffer"
    return ModelState(tensors, {**dict.fromkeys(tensors, "extra"), **kinds}, aliases, extra)


def load_model_state(module: nn.Module, state: ModelState) -> None:
    """Copy `state` into the module in place, or raise and change nothing.

    Module objects, Parameter objects and their storage stay the same, so optimizers and reducers
    that hold them continue to work.
    """
    prepare_model_load(module, state)()


def prepare_model_load(module: nn.Module, state: ModelState) -> Callable[[], None]:
    """Compare `state` with the module; return a function that copies it in, or raise."""
    live = module.state_dict(keep_vars=True)
    saved = state.state_dict()
    differences = [
        *compare(_facts(live), _facts(saved), "tensor"),
        *_untied(live, saved),
    ]
    refuse_differences("model", differences)
    values = OrderedDict(saved)
    with_versions_of(live, values)

    def load() -> None:
        # torch cannot write to tensors whose elements share memory
        shared = {n for n, t in live.items() if n in values and _shares_memory(t)}
        for name in shared:
            assign(live[name].detach(), values.pop(name))
        module.load_state_dict(values, strict=not shared)

    return load


def _shares_memory(value: object) -> bool:
    return isinstance(value, Tensor) and distinct_elements(value).numel() < value.numel()


def is_extra(name: str, value: object) -> bool:
    """True for what `set_extra_state` (or a hook) takes back, not a parameter or buffer."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)


def _facts(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: _fact(name, value) for name, value in state.items()}


def _fact(name: str, tensor: Tensor) -> str:
    if is_extra(name, tensor):
        return "extra state"
    if nn.parameter.is_lazy(tensor):
        return "without a shape yet (run the model once first)"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _untied(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Names that are one tensor here, but two different ones in the checkpoint."""
    first_names: dict[int, str] = {}
    for name, value in live.items():
        if name not in saved or is_extra(name, value):
            continue
        first = first_names.setdefault(id(value), name)
        one, other = saved[name], saved[first]
        if one is not other and not torch.equal(one, other):
            yield f"{name!r} and {first!r} are one tensor here, but differ in the checkpoint"


def refuse_differences(what: str, differences: Sequence[str]) -> None:
    """Raise when there is any difference, before anything was changed."""
    if not differences:
        return
    more = f" (and {counted(len(differences) - 1, 'more difference')})" if differences[1:] else ""
    raise CheckpointError(
        f"the checkpoint does not match the {what}: {differences[0]}{more}; nothing was loaded. "
        f"Build the same {what} as when it was saved"
    )


def compare(got: Mapping[str, Fact], saved: Mapping[str, Fact], noun: str) -> Iterator[str]:
    """The differences between what is here and what was saved, in the order of what is here."""
    for name, fact in got.items():
        if name not in saved:
            yield f"{noun} {name!r} is not in the checkpoint"
        elif fact != saved[name]:
            yield f"{noun} {name!r} is {fact} here, but {saved[name]} in the checkpoint"
    for name in saved:
        if name not in got:
            yield f"{noun} {name!r} of the checkpoint does not exist here"
