# SPDX-License-Identifier: Apache-2.0
"""Quality over slow networks: verdicts, settings, and a mode that trains to its end."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from benchmarks.slow_quality import Reached
from benchmarks.slow_quality_data import SYNC
from tests.workers import run_processes

from benchmarks import jobs, slow_quality, slow_quality_data, slow_quality_train
from fleetlight import DistributedStrategy


def reached(accuracy: float, loss: float, classifies: bool, name: str = "int8") -> Reached:
    return Reached(name, [0.9 + accuracy], [2.0 * (1 + loss)], [0.9], [2.0], classifies)


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (reached(-0.009, 9.0, True), "-1 point: met"),
        (reached(-0.011, 0.0, True), "-1 point: missed"),
        (reached(0.05, 0.0, True), "-1 point: met"),
        (reached(-0.5, 0.019, False), "+2 %: met"),
        (reached(0.0, 0.021, False), "+2 %: missed"),
        (reached(-0.5, 9.0, True, "top 1 %"), "-"),
        (reached(0.0, 0.0, True, SYNC), "-"),
    ],
    ids=["met", "missed", "better", "loss-met", "loss-missed", "no-bar", "base"],
)
def test_images_are_judged_by_accuracy_and_text_by_loss(one: Reached, verdict: str) -> None:
    assert one.verdict == verdict


def test_every_mode_has_valid_settings() -> None:
    for task in slow_quality_data.TASKS:
        for settings in slow_quality.modes(task, 500).values():
            DistributedStrategy(**{"shared_memory": False, **settings})
    assert "DGC, 0.1 %" in slow_quality.modes("digits", 500)
    assert "DGC, 0.1 %" not in slow_quality.modes("text", 500)
    assert list(slow_quality.modes("text-sgd", 500)) == [
        *("synchronous", "synchronous again", "DGC, 0.1 %")
    ]


def test_a_curve_averages_adjacent_steps() -> None:
    assert slow_quality_train.binned([4.0, 2.0]) == [4.0, 2.0]
    found = slow_quality_train.binned([float(n) for n in range(100)])
    assert found[:2] == [0.5, 2.5]
    assert len(found) == slow_quality_train.BINS


def test_letters_are_predicted_from_earlier_ones() -> None:
    torch.manual_seed(0)
    model = slow_quality_data.Transformer(5, width=8, heads=2, layers=1)
    x = torch.randint(5, (1, slow_quality_data.CONTEXT))
    other = x.clone()
    other[0, 40] = (other[0, 40] + 1) % 5
    one, changed = model(x), model(other)
    assert torch.allclose(one[0, :40], changed[0, :40])
    assert not torch.allclose(one[0, 40:], changed[0, 40:])


def test_targets_are_the_next_letters(tmp_path: Path) -> None:
    letters = bytes(range(97, 123)) * 60
    (tmp_path / "input.txt").write_bytes(letters)
    train, test = slow_quality_data.text(tmp_path, seed=0)
    assert torch.equal(train.x.flatten()[1:], train.y.flatten()[:-1])
    assert len(train.x) + len(test.x) == (len(letters) - 1) // slow_quality_data.CONTEXT


def test_absent_records_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(jobs.BenchmarkError, match=r"no input\.txt in .*--data"):
        slow_quality_data.text(tmp_path, seed=0)


@pytest.mark.multiprocess
def test_workers_end_with_equal_trained_models(tmp_path: Path) -> None:
    write_digits(tmp_path, count=400)
    slow_quality_data.put("digits", tmp_path, seed=0, folder=tmp_path)
    settings = slow_quality.modes("digits", 20)["LocalSGD, k = 4"]
    options = {"task": "digits", "folder": str(tmp_path), "seed": 0, "epochs": 3, "batch": 16}
    options = {**options, "settings": settings}
    one, other = run_processes(slow_quality_train.work, [(options,)] * 2)
    assert one["checksum"] == other["checksum"]
    assert (one["steps"], one["examples"], one["tested"]) == (30, 960, 80)
    assert one["accuracy"] > 0.4


def write_digits(folder: Path, count: int) -> None:
    """Images whose bright row encodes their digit."""
    images, labels = bytearray(), bytearray()
    for number in range(count):
        label = number % 10
        rows = [bytes([255 if row // 2 == label else 0]) * 28 for row in range(28)]
        images += b"".join(rows)
        labels.append(label)
    files = {"images-idx3": (3, images, (count, 28, 28)), "labels-idx1": (1, labels, (count,))}
    for name, (dims, body, sizes) in files.items():
        head = struct.pack(">HBB", 0, 8, dims) + struct.pack(f">{dims}I", *sizes)
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(head + body))
