# SPDX-License-Identifier: Apache-2.0
"""`LocalValues`: all values of a registered model, on this worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import ModelState
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.registering import registered_model

State = Mapping[str, Any]


class ModelNames:
    """A registered model among all of them."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.whole = registered_model(job)
        numbers = [n for n, plan in enumerate(job.models) if plan.module is model]
        self._prefix = f"{numbers[0]}." if len(job.models) > 1 else ""

    def local(self, values: State) -> dict[str, Any]:
        """Those of the model, by the names it has for them."""
        size = len(self._prefix)
        return {n[size:]: v for n, v in values.items() if n.startswith(self._prefix)}

    def named(self, rows: State) -> dict[str, Any]:
        """Tables by the names that the model has for them."""
        return {name.removeprefix(self._prefix): value for name, value in rows.items()}

    def table(self, name: str) -> str:
        """What ids and rows of a table stand under."""
        return name.removeprefix(self._prefix)


class LocalValues:
    """This worker has them all."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._names, self._model = ModelNames(job, model), model

    def row_bytes(self) -> int:
        """As in `ModelValues`."""
        return 0

    def gathered(self) -> dict[str, Any]:
        """As in `ModelValues`."""
        state = checkpoint.model_state(self._names.whole)
        return self._names.local(copied(state).state_dict())

    def fitted(self, state: State) -> Iterator[Callable[[], None]]:
        """As in `ModelValues`."""
        yield fitted_values(self._model, dict(state))

    def held_here(self) -> list[Tensor]:
        """As in `ModelValues`."""
        return tensors_of(self._model, set())

    def taken(self, operation: str) -> None:
        """Every step is made together."""


def fitted_values(model: nn.Module, values: dict[str, Any]) -> Callable[[], None]:
    """What gives a model values; they are compared first."""
    return checkpoint.prepare_model_load(
        model, ModelState(values, dict.fromkeys(values, "parameter"))
    )


def tensors_of(model: nn.Module, elsewhere: set[int]) -> list[Tensor]:
    """The parameters and buffers of a model that are not elsewhere."""
    tensors = (*model.parameters(), *model.buffers())
    return [t.detach() for t in tensors if id(t) not in elsewhere and t.numel()]


def copied(state: ModelState) -> ModelState:
    """On the CPU."""
    copies = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    return dataclasses.replace(state, tensors=copies)
