# SPDX-License-Identifier: Apache-2.0
"""The dense values of a publication: those of the servers, and those that worker 0 keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.fleet.checkpoints.model_values import copied
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.server_checkpoint import table_weights
from fleetlight.fleet.training.registering import registered_model
from fleetlight.ps.tables.dense_state import DenseState, tensor_of, whole
from fleetlight.ps.transport.interface import ReceivedReply


def local_values(job: Job, session: ServerSession) -> dict[str, Tensor]:
    """Copies of the dense values of worker 0, by name; tied ones have their first name alone."""
    state = checkpoint.model_state(registered_model(job))
    tables = {id(weight) for weight in table_weights(session.bound)}
    live = registered_model(job).state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in copied(state).tensors.items()
        if state.kinds[name] != "extra" and id(live[name]) not in tables
    }


def with_served(
    values: Mapping[str, Tensor], session: ServerSession, replies: Mapping[int, ReceivedReply]
) -> dict[str, Tensor]:
    """The values, with those that the servers had at their cuts."""
    plan, placement = session.bound.plan, session.client.placement
    states = [DenseState(replies[server].arrays, [], [], []) for server in sorted(replies)]
    served = whole(plan, placement, states).values
    return dict(values) | {
        plan.dense[number].name: tensor_of(array).view(plan.dense[number].shape).clone()
        for number, array in served.items()
    }


def with_tied(job: Job, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under all their names: a program has each name of tied values."""
    aliases = checkpoint.model_state(registered_model(job)).aliases
    tied = {name: values[first].clone() for name, first in aliases.items() if first in values}
    return {**values, **tied}


def encoded(values: Mapping[str, Tensor]) -> bytes:
    """The values as safetensors; NumPy has no bfloat16, so they become float32."""
    tensors = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
        for name, tensor in values.items()
    }
    return save(tensors)
