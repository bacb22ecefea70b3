# SPDX-License-Identifier: Apache-2.0
"""`RenamedCheckpoint`: a checkpoint with other names for its tensors and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from fleetlight.checkpoint.reader import Checkpoint
from fleetlight.checkpoint.state.model import ModelState
from fleetlight.checkpoint.state.worker import WorkerState
from fleetlight.checkpoint.storage.manifest import Manifest, OptimizerEntry, TableEntry

Name = Callable[[str], str]
_T = TypeVar("_T")


class RenamedCheckpoint(Checkpoint):
    """Returns the new names; the files, and the tensors in them, keep the old ones."""

    def __init__(self, saved: Checkpoint, name: Name) -> None:
        super().__init__(saved.directory, saved.source, _manifest(saved.manifest, name))
        self._saved, self._name = saved, name

    def model(self) -> ModelState:
        """The model's state."""
        state, name = self._saved.model(), self._name
        # extra state refers to tensors by their names in the files
        new = {one: one if kind == "extra" else name(one) for one, kind in state.kinds.items()}
        return ModelState(
            {new[one]: tensor for one, tensor in state.tensors.items()},
            {new[one]: kind for one, kind in state.kinds.items()},
            {name(second): name(first) for second, first in state.aliases.items()},
            _keys(state.extra, name),
        )

    def worker(self, rank: int) -> WorkerState | None:
        """The state of one worker at the save, None if there was no such worker."""
        state = self._saved.worker(rank)
        if state is None:
            return None
        return dataclasses.replace(
            state,
            values=_deep_keys(state.values, self._name),
            tensors={_last_part(one, self._name): t for one, t in state.tensors.items()},
        )


def _manifest(manifest: Manifest, name: Name) -> Manifest:
    return msgspec.structs.replace(
        manifest,
        aliases={name(second): name(first) for second, first in manifest.aliases.items()},
        model_extra=_keys(manifest.model_extra, name),
        optimizers=[_optimizer(entry, name) for entry in manifest.optimizers],
        tables=[_table(entry, name) for entry in manifest.tables],
    )


def _optimizer(entry: OptimizerEntry, name: Name) -> OptimizerEntry:
    groups = [
        msgspec.structs.replace(group, params=[name(one) for one in group.params])
        for group in entry.param_groups
    ]
    return msgspec.structs.replace(
        entry,
        shapes=_keys(entry.shapes, name),
        param_groups=groups,
        state=_keys(entry.state, name),
    )


def _table(entry: TableEntry, name: Name) -> TableEntry:
    weights = [name(one) for one in entry.weights]
    return msgspec.structs.replace(entry, name=name(entry.name), weights=weights)


def _keys(named: Mapping[str, _T], name: Name) -> dict[str, _T]:
    return {name(one): value for one, value in named.items()}


def _deep_keys(value: Any, name: Name) -> Any:
    """Rename keys at any depth of a worker's values."""
    if isinstance(value, list):
        return [_deep_keys(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name(key) if isinstance(key, str) else key: _deep_keys(item, name)
        for key, item in value.items()
    }


def _last_part(one: str, name: Name) -> str:
    """Rename the last part of `kind/number/parameter`, the name of a worker's tensor."""
    head, slash, last = one.rpartition("/")
    return head + slash + name(last)
