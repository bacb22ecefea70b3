# SPDX-License-Identifier: Apache-2.0
"""Exports modules to programs of torch, with a batch of any size where the module allows it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.passes import move_to_device_pass

from fleetlight.checkpoint.inference.lookups import (
    IdsOf,
    LookupEntry,
    TakenRows,
    WithRows,
    example_rows,
    lookups_of,
)
from fleetlight.errors import CheckpointError, ConfigError, did_you_mean

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a module was exported to."""

    program: ExportedProgram
    #: returns the ids of lookups, whose rows `program` takes; None: it takes none. Both take their
    #: inputs by position.
    ids: ExportedProgram | None
    lookups: Sequence[LookupEntry]
    #: the inputs whose first dimension may have any size
    batched: Sequence[str]
    #: why the batch size is fixed, None if it is not
    static_because: str | None

    def on(self, device: torch.device) -> Programs:
        """The programs on one device, so that those trained on a GPU run anywhere."""
        ids = None if self.ids is None else on_device(self.ids, device)
        return dataclasses.replace(self, program=on_device(self.program, device), ids=ids)


def exported(
    module: nn.Module, examples: Mapping[str, Tensor], positional: bool, batched: Sequence[str]
) -> Programs:
    """Export a module in eval mode; without batched inputs, or if that fails, for one size."""
    with _evaluating(module):
        reason = None if batched else "no batch dimension was asked for or found"
        if batched:
            try:
                return _traced(module, _two_rows(examples, batched), positional, batched, None)
            except Exception as error:  # whatever it is, one batch size may still work
                reason = first_line(error)
                _log.warning(
                    "%s: exported for the example's batch size only, because: %s",
                    type(module).__name__,
                    reason,
                )
        try:
            return _traced(module, examples, positional, [], reason)
        except CheckpointError:
            raise
        except Exception as error:  # torch raises many kinds here
            raise CheckpointError(
                f"{type(module).__name__} cannot be exported: {first_line(error)}; "
                f"expected a forward that torch.export can trace"
            ) from error


def batched_inputs(examples: Mapping[str, Tensor], wanted: bool | Collection[str]) -> list[str]:
    """The names of the inputs whose first dimension is the batch."""
    with_rows = [name for name, example in examples.items() if example.dim() > 0]
    if wanted is False or not with_rows:
        return []
    if wanted is True:
        rows = examples[with_rows[0]].shape[0]
        wanted = [name for name in with_rows if examples[name].shape[0] == rows]
    for name in wanted:
        if name not in with_rows:
            raise ConfigError(
                f"dynamic_batch: got {name!r}, expected inputs that have dimensions; "
                f"{did_you_mean(name, with_rows)}"
            )
        if examples[name].shape[0] == 0:
            raise ConfigError(f"example input {name!r} has no rows; expected at least one")
    return [name for name in with_rows if name in wanted]


def on_device(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program on one device."""
    held = [*program.state_dict.values(), *program.constants.values()]
    devices = {tensor.device for tensor in held if isinstance(tensor, Tensor)}
    return program if devices <= {device} else move_to_device_pass(program, device)


def first_line(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every submodule gets its own training flag back."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def _traced(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    positional: bool,
    batched: Sequence[str],
    reason: str | None,
) -> Programs:
    args = tuple(examples.values()) if positional else ()
    kwargs = {} if positional else dict(examples)
    shapes, batch = ShapesCollection(), Dim("batch", min=1)  # type: ignore[no-untyped-call]
    for name in batched:
        shapes[examples[name]] = {0: batch}
    dynamic: Any = shapes if batched else None
    if not _takes_rows(module):
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
        return Programs(program, None, [], batched, reason)
    names, inputs = None if positional else list(examples), tuple(examples.values())
    lookups = lookups_of(module, examples, names, batched)
    ids_of = IdsOf(module, names)
    ids = torch.export.export(ids_of, inputs, dynamic_shapes=dynamic)
    rows = example_rows(ids_of(*inputs), lookups)
    for one, entry in zip(rows, lookups, strict=True):
        if entry.per_record is not None:
            shapes[one] = {0: batch if entry.per_record == 1 else entry.per_record * batch}
    with_rows = WithRows(module, names)
    program = torch.export.export(with_rows, (rows, *inputs), dynamic_shapes=dynamic)
    return Programs(program, ids, lookups, batched, reason)


def _takes_rows(module: nn.Module) -> bool:
    return any(isinstance(part, TakenRows) for part in module.modules())


def _two_rows(examples: Mapping[str, Tensor], batched: Sequence[str]) -> dict[str, Tensor]:
    """The same inputs with a batch of at least 2: torch takes sizes 0 and 1 for constants."""
    if all(examples[name].shape[0] >= 2 for name in batched):
        return dict(examples)
    doubled = {name: torch.cat([examples[name][:1]] * 2) for name in batched}
    return {**examples, **doubled}
