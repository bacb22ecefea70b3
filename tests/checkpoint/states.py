# SPDX-License-Identifier: Apache-2.0
"""Small snapshots to save, and an os module that fails or stops at the n-th call."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fleetlight import checkpoint
from fleetlight.checkpoint.storage import files, generations
from fleetlight.checkpoint.storage.manifest import FileEntry
from fleetlight.files import atomic, lock

#: the modules that change a disk, and their calls that do so
_CHANGERS = (files, generations, atomic, lock)
CHANGES = ("open", "write", "pwrite", "ftruncate", "fsync", "mkdir", "replace", "unlink")


def snapshot(step: int, size: int = 4) -> checkpoint.JobSnapshot:
    """A job after `step` steps; every number in it equals the step."""
    module = torch.nn.Linear(size, 2)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(step)
    worker = checkpoint.WorkerState(rank=0, values={"sampler": {"position": step}})
    return checkpoint.JobSnapshot(
        model=checkpoint.model_state(module),
        optimizers=[optimizer_state(module, torch.optim.SGD(module.parameters(), lr=0.5))],
        workers=[worker],
        step=step,
    )


def optimizer_state(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> checkpoint.OptimizerState:
    return checkpoint.optimizer_state(optimizer, names(module))


def names(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    return {param: name for name, param in module.named_parameters()}


def whole_step(dirname: str | os.PathLike[str]) -> int:
    """The step of the checkpoint in `dirname`, after checking every byte and number."""
    found = checkpoint.read(dirname)
    found.verify()
    assert {float(t.unique()) for t in found.model().tensors.values()} == {found.manifest.step}
    worker = found.worker(0)
    assert worker is not None
    assert worker.values == {"sampler": {"position": found.manifest.step}}
    return found.manifest.step


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name not in (".lock",))


def described(path: Path) -> FileEntry:
    """The manifest entry for the present content of a file."""
    data = path.read_bytes()
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())


class WatchedOs:
    """The os module, except that `at_change` is called before each call that changes the disk."""

    def __init__(self, at_change: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        self._at_change = at_change
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.changes += 1
            self._at_change(self.changes, name, args)
            return real(*args, **kwargs)

        return watched

    def install(self) -> None:
        for module in _CHANGERS:
            module.os = self  # type: ignore[attr-defined]


def uninstall() -> None:
    for module in _CHANGERS:
        module.os = os  # type: ignore[attr-defined]


def full_disk_at(call: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    """The disk is full from the n-th change on, except for removals."""

    def fail(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number >= call and name != "unlink":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

    return fail
