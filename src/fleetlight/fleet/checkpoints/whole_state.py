# SPDX-License-Identifier: Apache-2.0
"""`fleet.state_dict` and `fleet.load_state_dict`: all values of a model, even those on servers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor, nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.errors import CheckpointError, ComebackError, PlanError
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.torch_compat.modules import with_versions_of

#: default limit of a state in the memory of worker 0
MAX_BYTES = 4 << 30
State = Mapping[str, Any]


def state_dict(model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """All values of a registered model, on worker 0; the other workers get an empty dict.

    Every worker calls it, after the same step. Names are those of `model.state_dict()`. A table of
    `fleet.nn` becomes `<table>.ids`, ascending, and `<table>.weight`, their rows; a layer of torch
    whose rows are on servers has its whole weight. The tensors are copies on the CPU. Optimizers
    are not included; `fleet.save_persistables` saves them as well.

    Args:
        model: the registered model.
        max_bytes: the most bytes that worker 0 may take for it.

    Returns:
        Tensors by name on worker 0, an empty dict on the others.

    Raises:
        PlanError: the model is not registered.
        CheckpointError: the values take more than `max_bytes`.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, table="emb"))
        >>> _ = model(torch.tensor([9, 7]))
        >>> fleet.state_dict(model)["emb.ids"]
        tensor([7, 9])
    """
    return _state_dict(_checked(model, "state_dict"), model, max_bytes=max_bytes)


def _state_dict(job: Job, model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The values of a model in a given job."""
    found: dict[str, Any] = {}

    def gather() -> None:
        found.update(_gathered(job, model, max_bytes))

    is_first = job.group.index == 0
    with job.at_rest():
        job.group.assemble("fleet.state_dict")
        local_training.average_with_states(job, "fleet.state_dict")
        job.group.together(gather if is_first else None, "fleet.state_dict")
    if is_first and not found:
        raise ComebackError(
            "this worker was restarted, and the state that fleet.state_dict returned before is "
            "lost; save values that a restart needs with fleet.save_persistables(dirname)"
        )
    return found


def load_state_dict(model: nn.Module, state: State) -> None:
    """Give all workers and servers the values of worker 0's state.

    Every worker calls it. If the state does not fit, nothing changes. Rows that are not in it
    return to their first values. Optimizers do not change, nor does the optimizer state of rows.

    Args:
        model: the registered model.
        state: a dict of `fleet.state_dict`, or of `model.state_dict()` where no rows are on
            servers. Only that of worker 0 is used.

    Raises:
        PlanError: the model is not registered.
        CheckpointError: the state does not fit the model.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> fleet.load_state_dict(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> model.weight.sum().item()
        2.0
    """
    _load_state_dict(_checked(model, "load_state_dict"), model, state)


def _load_state_dict(job: Job, model: nn.Module, state: State) -> None:
    """Load a state in a given job."""
    job.open()

    def load() -> list[bytes]:
        job.replay.disable("it was loading a state, or had just loaded one")
        _load(job, model, state)
        return []

    job.run_once("fleet.load_state_dict", load)


def _checked(model: nn.Module, name: str) -> Job:
    job = current()
    job.refuse_in_server(name)
    if not any(managed.module is model for managed in job.models):
        raise PlanError(
            f"fleet.{name}: the model is not registered; give the module that "
            "fleet.distributed_model returned, or program.model"
        )
    return job


# -- out of the job


def _gathered(job: Job, model: nn.Module, max_bytes: int) -> dict[str, Any]:
    values = job.values_of(model)
    _refuse_large(_nbytes(model) + values.row_bytes(), max_bytes)
    return values.gather()


def _nbytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _refuse_large(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise CheckpointError(
            f"fleet.state_dict: the values take {nbytes:,} bytes, more than max_bytes={max_bytes:,}"
            f"; call fleet.state_dict(model, max_bytes={nbytes}) if worker 0 has the memory, or "
            "fleet.save_persistables(dirname), whose files fleetlight export merges into one"
        )


# -- into the job


def _load(job: Job, model: nn.Module, state: State) -> None:
    operation, is_first = "fleet.load_state_dict", job.group.index == 0
    loads: list[Callable[[], None]] = []
    extra = b""
    with job.at_rest(everything=True):
        values = job.values_of(model)
        job.group.assemble(operation)

        def fit() -> None:
            nonlocal extra
            _check(state)
            loads.extend(values.prepare(state))
            # a single worker may load values that cannot be packed
            extra = b"" if job.group.alone else _packed_extra(model, state)

        def take() -> None:
            _put_extra(model, extra)

        def load() -> None:
            for one in loads:
                one()

        job.group.together(fit if is_first else None, operation)
        job.group.together(load if is_first else None, operation)
        extra = job.group.broadcast_bytes(extra, operation)
        job.group.together(None if is_first else take, operation)
        job.group.broadcast(values.local_tensors(), operation)
        local_training.restart(job, names_of(registered_model(job)))
    values.wait_until_applied(operation)


def _check(state: State) -> None:
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"fleet.load_state_dict: worker 0 passed {_kind_of(state)}, expected a result of "
            "fleet.state_dict"
        )


def _kind_of(state: Any) -> str:
    return f"a {type(state).__name__}" if not isinstance(state, Mapping) else "an empty state"


# -- the values of `set_extra_state` go to all workers, packed as in checkpoints


def _packed_extra(model: nn.Module, state: Mapping[str, Any]) -> bytes:
    """The extra values of a state, packed; empty where no module has any."""
    extra = {name: state[name] for name in _extra_names(model) if name in state}
    tensors: dict[str, Tensor] = {}
    words = {name: checkpoint.pack(value, name, tensors) for name, value in extra.items()}
    if not words:
        return b""
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return msgspec.msgpack.encode((words, safetensors.torch.save(copies)))


def _put_extra(model: nn.Module, packed: bytes) -> None:
    """Load packed extra values into their modules."""
    if not packed:
        return
    words, file = msgspec.msgpack.decode(packed)
    tensors = safetensors.torch.load(file)
    values = OrderedDict((name, checkpoint.unpack(word, tensors)) for name, word in words.items())
    with_versions_of(model.state_dict(keep_vars=True), values)
    model.load_state_dict(values, strict=False)


def _extra_names(model: nn.Module) -> list[str]:
    live = model.state_dict(keep_vars=True)
    return [name for name, value in live.items() if checkpoint.is_extra(name, value)]
