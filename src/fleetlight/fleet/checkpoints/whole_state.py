# SPDX-License-Identifier: Apache-2.0
"""`fleet.state_dict` and `fleet.load_state_dict`: all values of a model, wherever they are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor, nn

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.errors import CheckpointError, ComebackError, PlanError
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.torch_compat.modules import with_versions_of

#: of a state that worker 0 holds in memory, unless it is told otherwise
MAX_BYTES = 4 << 30
State = Mapping[str, Any]


def state_dict(model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """All values of a registered model, on worker 0; the other workers get an empty dict.

    Every worker calls it, behind the same step. Names are those of `model.state_dict()`. A table
    of `fleet.nn` becomes `<table>.ids`, ascending, and `<table>.weight`, their rows; a layer of
    torch whose rows are on servers has its whole weight. The tensors are copies, on the CPU.
    Optimizers are not part of it: `fleet.save_persistables` saves them, too.
    """
    return _taken_in(_checked(model, "state_dict"), model, max_bytes=max_bytes)


def _taken_in(job: Job, model: nn.Module, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The same in a given context."""
    found: dict[str, Any] = {}

    def gather() -> None:
        found.update(_gathered(job, model, max_bytes))

    is_first = job.group.index == 0
    with job.at_rest():
        job.group.assemble("fleet.state_dict")
        local_training.settle(job, "fleet.state_dict")
        job.group.together(gather if is_first else None, "fleet.state_dict")
    if is_first and not found:
        raise ComebackError(
            "this worker was started again, and what fleet.state_dict gave it before is gone; keep "
            "values that a later start needs by fleet.save_persistables(dirname)"
        )
    return found


def load_state_dict(model: nn.Module, state: State) -> None:
    """Give all workers and servers the values of a state, that of worker 0.

    Every worker calls it. Nothing changes where the state does not fit. Rows that are not in it go
    back to their first values. Optimizers stay as they are, what rules remember of rows included.
    """
    _put_into(_checked(model, "load_state_dict"), model, state)


def _put_into(job: Job, model: nn.Module, state: State) -> None:
    """The same in a given context."""
    job.open()

    def load() -> list[bytes]:
        job.replay.give_up("it was about to load a state, or had just done")
        _load(job, model, state)
        return []

    job.once("fleet.load_state_dict", load)


def _checked(model: nn.Module, name: str) -> Job:
    job = current()
    job.refuse_in_server(name)
    if not any(plan.module is model for plan in job.models):
        raise PlanError(
            f"fleet.{name}: the model is no registered one; give the module that "
            "fleet.distributed_model returned, or program.model"
        )
    return job


# -- out of the job


def _gathered(job: Job, model: nn.Module, max_bytes: int) -> dict[str, Any]:
    values = job.values_of(model)
    _refuse_large(_nbytes(model) + values.row_bytes(), max_bytes)
    return values.gathered()


def _nbytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _refuse_large(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise CheckpointError(
            f"fleet.state_dict: the values take {nbytes:,} bytes, more than max_bytes={max_bytes:,}"
            f"; give fleet.state_dict(model, max_bytes={nbytes}) if worker 0 has the memory, or "
            "write files by fleet.save_persistables(dirname), of which fleetlight export makes one"
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
            loads.extend(values.fitted(state))
            # one worker alone may be given what cannot travel
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
        job.group.broadcast(values.held_here(), operation)
        local_training.begin_anew(job, names_of(registered_model(job)))
    values.taken(operation)


def _check(state: State) -> None:
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"fleet.load_state_dict: worker 0 gave {_said(state)}, expected what fleet.state_dict "
            "gave it"
        )


def _said(state: Any) -> str:
    return f"a {type(state).__name__}" if not isinstance(state, Mapping) else "an empty state"


# -- what `set_extra_state` takes back travels to all workers, packed as in checkpoints


def _packed_extra(model: nn.Module, state: Mapping[str, Any]) -> bytes:
    """The extra values of a state; none where no module has any."""
    extra = {name: state[name] for name in _extra_names(model) if name in state}
    tensors: dict[str, Tensor] = {}
    words = {name: checkpoint.pack(value, name, tensors) for name, value in extra.items()}
    if not words:
        return b""
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return msgspec.msgpack.encode((words, safetensors.torch.save(copies)))


def _put_extra(model: nn.Module, told: bytes) -> None:
    """Give them to the modules they are of."""
    if not told:
        return
    words, file = msgspec.msgpack.decode(told)
    tensors = safetensors.torch.load(file)
    values = OrderedDict((name, checkpoint.unpack(word, tensors)) for name, word in words.items())
    with_versions_of(model.state_dict(keep_vars=True), values)
    model.load_state_dict(values, strict=False)


def _extra_names(model: nn.Module) -> list[str]:
    live = model.state_dict(keep_vars=True)
    return [name for name, value in live.items() if checkpoint.is_extra(name, value)]
