# SPDX-License-Identifier: Apache-2.0
"""One list of parts saves, loads and replays a worker's state."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.fleet import job as jobs
from fleetlight.fleet.checkpoints import worker_state
from fleetlight.fleet.checkpoints.worker_state import PARTS, saved_values
from fleetlight.fleet.protocols import Purpose, SavedPart


@dataclasses.dataclass
class Toy:
    """A new part: one class, and its place in the list."""

    context: jobs.Job
    name: ClassVar[str] = "toy"
    purposes: ClassVar[tuple[Purpose, ...]] = tuple(Purpose)
    value: ClassVar[Any] = None
    loaded: ClassVar[list[SavedPart]] = []

    def save(self) -> Any:
        return self.value

    def load(self, saved: SavedPart) -> None:
        self.loaded.append(saved)


def with_toy(folder: str) -> tuple[str, int, list[int], list[int]]:
    worker_state.PARTS = (*PARTS, Toy)
    mine = fleet.worker_index()
    Toy.value = {"count": 3 + mine, "kept": torch.arange(2) + mine}
    fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.save_persistables(folder)
    fleet.load_persistables(folder)
    [saved] = Toy.loaded
    counts = [value["count"] for value in saved.each]
    return saved.purpose.name, saved.first["count"], counts, saved.own["kept"].tolist()


@pytest.mark.multiprocess
def test_a_new_part_is_saved_and_loaded(tmp_path: Path) -> None:
    zero, one = run_workers(with_toy, 2, str(tmp_path))
    assert zero == ("CHECKPOINT", 3, [3, 4], [0, 1])
    assert one == ("CHECKPOINT", 3, [3, 4], [1, 2])


def test_part_without_state_is_not_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_state, "PARTS", (Toy,))
    monkeypatch.setattr(Toy, "value", None)
    assert saved_values(None, Purpose.REPLAY) == {}  # type: ignore[arg-type]
    monkeypatch.setattr(Toy, "value", 0)
    assert saved_values(None, Purpose.REPLAY) == {"toy": 0}  # type: ignore[arg-type]


@pytest.mark.parametrize("purpose", Purpose)
def test_parts_have_distinct_names(purpose: Purpose) -> None:
    names = [part.name for part in PARTS if purpose in part.purposes]  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
