# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tables, on tables of a size that nobody would measure."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks import kernels


def test_it_says_what_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    assert kernels.main(["--ids", "30000", "--rounds", "1", "--scale", "--no-write"]) == 0
    printed = capsys.readouterr().out
    assert "| pull, zipf |" in printed
    assert "| push, uniform |" in printed
    assert "bytes per id" in printed
    assert os.sched_getaffinity(0) == cores


def test_all_ids_are_there_before_measuring() -> None:
    work = kernels.prepare(30_000, 2, 0, 2)
    assert len(work.table) == 30_000
    for batches in work.batches.values():
        assert (work.table.find(np.concatenate(batches)) >= 0).all()


def test_click_logs_repeat_ids_and_uniform_ones_do_not() -> None:
    distinct = {kind: len(np.unique(kernels.draw(kind, 10**6, 1)[0])) for kind in kernels.PULL}
    assert distinct["zipf"] < 0.55 * kernels.BATCH
    assert distinct["uniform"] > 0.97 * kernels.BATCH
