# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tables, on tiny tables."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks import kernels


@pytest.mark.slow
def test_the_benchmark_prints_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    assert kernels.main(["--ids", "30000", "--rounds", "1", "--scale", "--no-write"]) == 0
    printed = capsys.readouterr().out
    assert "| pull, zipf |" in printed
    assert "| push, uniform |" in printed
    assert "bytes per id" in printed
    assert os.sched_getaffinity(0) == cores


def test_all_ids_exist_before_measuring() -> None:
    work = kernels.prepare(30_000, 2, 0, 2)
    assert len(work.table) == 30_000
    for batches in work.batches.values():
        assert (work.table.find(np.concatenate(batches)) >= 0).all()


def test_click_logs_repeat_ids_and_uniform_ones_do_not() -> None:
    distinct = {kind: len(np.unique(kernels.draw(kind, 10**6, 1)[0])) for kind in kernels.PULL}
    assert distinct["zipf"] < 0.55 * kernels.BATCH
    assert distinct["uniform"] > 0.97 * kernels.BATCH


def test_a_turn_measures_its_first_and_last_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 77.0, 0.25])
    parts: list[list[int]] = []

    def cpu_s(_: object, batches: list[kernels.Ids]) -> float:
        parts.append([int(batch[0]) for batch in batches])
        return next(seconds)

    monkeypatch.setattr(kernels, "cpu_s", cpu_s)
    turn = kernels.turn(len, [np.array([k]) for k in range(60)])
    assert parts == [[*range(25)], [*range(25, 35)], [*range(35, 60)]]
    assert (turn.first, turn.steady) == (1.0, 2.0)


def test_only_the_largest_table_has_a_bar_and_memory_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = [[kernels.Turn(1.0, 10.0), kernels.Turn(1.0, 4.0)]]
    measured = {("pull", "zipf"): turns, (kernels.MEMORY, "zipf"): turns}
    monkeypatch.setattr(kernels, "measure", lambda *_: measured)
    monkeypatch.setattr(kernels, "prepare", lambda *_: None)
    lines = kernels.scale_section([10**6, 2 * 10**6], 1).splitlines()
    assert [line.split("|")[4].strip() for line in lines[2:]] == ["-", "2: missed", "-", "-"]


@pytest.mark.slow
def test_memory_is_read_by_the_high_bits() -> None:
    memory = np.zeros(64, np.float32)
    memory[48] = 1
    last, first = -1, 0
    assert kernels.read_lines(memory, 16, np.array([last, last, first])) == 2
