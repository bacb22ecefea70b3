# SPDX-License-Identifier: Apache-2.0
"""What `set_extra_state` takes back travels to all workers, packed as in checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor, nn

import fleetlight.checkpoint as checkpoint
from fleetlight.torch_compat.modules import with_versions_of


def packed(model: nn.Module, state: Mapping[str, Any]) -> bytes:
    """The extra values of a state; none where no module has any."""
    extra = {name: state[name] for name in _names(model) if name in state}
    tensors: dict[str, Tensor] = {}
    words = {name: checkpoint.pack(value, name, tensors) for name, value in extra.items()}
    if not words:
        return b""
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return msgspec.msgpack.encode((words, safetensors.torch.save(copies)))


def put(model: nn.Module, told: bytes) -> None:
    """Give them to the modules they are of."""
    if not told:
        return
    words, file = msgspec.msgpack.decode(told)
    tensors = safetensors.torch.load(file)
    values = OrderedDict((name, checkpoint.unpack(word, tensors)) for name, word in words.items())
    with_versions_of(model.state_dict(keep_vars=True), values)
    model.load_state_dict(values, strict=False)


def _names(model: nn.Module) -> list[str]:
    live = model.state_dict(keep_vars=True)
    return [name for name, value in live.items() if checkpoint.is_extra(name, value)]
