# SPDX-License-Identifier: Apache-2.0
"""`LocalValues`: all values of a registered model, on this worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import ModelState
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.registering import registered_model

State = Mapping[str, Any]


class ModelNames:
    """The names of one registered model among several."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.whole = registered_model(job)
        numbers = [n for n, managed in enumerate(job.models) if managed.module is model]
        self._prefix = f"{numbers[0]}." if len(job.models) > 1 else ""

    def local(self, values: State) -> dict[str, Any]:
        """The values of this model, by its own names."""
        size = len(self._prefix)
        return {n[size:]: v for n, v in values.items() if n.startswith(self._prefix)}

    def named(self, rows: State) -> dict[str, Any]:
        """Tables by the model's own names."""
        return {name.removeprefix(self._prefix): value for name, value in rows.items()}

    def table(self, name: str) -> str:
        """The model's own name of a table."""
        return name.removeprefix(self._prefix)


class LocalValues:
    """The values of a model without servers."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._names, self._model = ModelNames(job, model), model

    def row_bytes(self) -> int:
        return 0

    def gather(self) -> dict[str, Any]:
        state = checkpoint.model_state(self._names.whole)
        return self._names.local(copied(state).state_dict())

    def prepare(self, state: State) -> Iterator[Callable[[], None]]:
        yield prepare_values(self._model, dict(state))

    def local_tensors(self) -> list[Tensor]:
        return tensors_of(self._model, set())

    def wait_until_applied(self, operation: str) -> None:
        """All workers have the values."""


def prepare_values(model: nn.Module, values: dict[str, Any]) -> Callable[[], None]:
    """Compare values with a model; returns the step that sets them."""
    return checkpoint.prepare_model_load(
        model, ModelState(values, dict.fromkeys(values, "parameter"))
    )


def tensors_of(model: nn.Module, elsewhere: set[int]) -> list[Tensor]:
    """The parameters and buffers of a model, without those that are `elsewhere`."""
    tensors = (*model.parameters(), *model.buffers())
    return [t.detach() for t in tensors if id(t) not in elsewhere and t.numel()]


def copied(state: ModelState) -> ModelState:
    """Copy a state to the CPU."""
    copies = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    return dataclasses.replace(state, tensors=copies)
