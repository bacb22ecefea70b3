# SPDX-License-Identifier: Apache-2.0
"""Tables with weights in bfloat16: checkpoints, snapshots, entries, and recovery from the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.kernels.batches import numbers
from tests.ps.made_tables import ALL, LR, by_id, ids_of, ones, read, saved, some_ids, table_plan
from tests.ps.restartable import IDS, RestartableCluster, rows
from tests.ps.serving import plan

from fleetlight.kernels import from_bfloat16, to_bfloat16
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.tables.table import Table

FEW = some_ids(50)


def table(dtype: str, rule: str = "adagrad", geo: bool = False, **rest: Any) -> Table:
    return Table(msgspec.structs.replace(table_plan(rule, **rest), dtype=dtype), seed=7, geo=geo)


def trained(dtype: str, **rest: Any) -> Table:
    made = table(dtype, **rest)
    for step in range(5):
        made.push(FEW, numbers(step, len(FEW), 3), LR, step)
    return made


@pytest.mark.parametrize(("of", "into"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_checkpoint_loads_into_tables_of_both_types(of: str, into: str, tmp_path: Path) -> None:
    before, after = trained(of), table(into)
    tensors = saved(before, tmp_path / "a")
    assert tensors["weights"].dtype == np.float32
    after.load([tmp_path / "a" / "t.safetensors"], ALL)
    expected = read(before, FEW)
    if into == "bf16":
        expected = from_bfloat16(to_bfloat16(expected))
    np.testing.assert_array_equal(read(after, FEW), expected)
    # the state is that of the file, so training continues
    again = saved(after, tmp_path / "b")
    np.testing.assert_array_equal(again["state.sum"], tensors["state.sum"])


def test_a_cut_keeps_the_rows_while_training_changes_them(tmp_path: Path) -> None:
    for ordered in (True, False):
        one = trained("bf16")
        expected = read(one, FEW)
        cut = one.cut(ordered=ordered)
        one.push(FEW, numbers(9, len(FEW), 3), LR, 9)
        name = f"{ordered}.safetensors"
        one.save(cut, 0, tmp_path, name)
        back = table("bf16")
        back.load([tmp_path / name], ALL if ordered else None)
        np.testing.assert_array_equal(read(back, FEW), expected)
        assert (read(one, FEW) != expected).any()


def test_entries_count_shrink_and_reset_narrow_rows(tmp_path: Path) -> None:
    one = table("bf16", entry=EntryPlan("count", 2))
    for _ in range(2):
        one.pull(ids_of(1, 2, 3), insert=True)
    one.push(ids_of(1, 2, 3), ones(3), LR, 0)
    first = read(one, ids_of(4))
    assert one.shrink(0, 0.5, 0.1) == (3, 0)
    one.fill(ids_of(1, 4), ones(2, value=0.3))
    np.testing.assert_array_equal(read(one, ids_of(1, 4)), ones(2, value=0.30078125))
    one.reset()
    np.testing.assert_array_equal(read(one, ids_of(4)), first)
    assert by_id([saved(one, tmp_path)])


def test_differences_of_geo_round_at_random() -> None:
    one = table("bf16", geo=True)
    ids = np.arange(2000, dtype=np.int64)
    one.fill(ids, ones(len(ids)))
    for step in range(10):
        one.exchange(ids, ones(len(ids), value=2.0**-11), wants=False, step=step)
    mean = float(one.pull(ids, False).mean(dtype=np.float64))
    assert mean == pytest.approx(1 + 10 * 2.0**-11, abs=1e-4)


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_server_that_restarts_has_the_same_rows(snapshot: bool, tmp_path: Path) -> None:
    """Replay of the log rounds as the first time."""
    made = plan("async", durability="log")
    users = msgspec.structs.replace(made.tables[0], dtype="bf16")
    cluster = RestartableCluster(tmp_path, msgspec.structs.replace(made, tables=[users]), log=True)
    for step in range(6):
        cluster.workers[0].push(step, {0: (IDS, [0.001 * (step + i) for i in range(len(IDS))])})
        if snapshot and step == 3:
            cluster.durability.snapshot_now()
    before = rows(cluster.workers[0])
    assert len(set(before)) > 2
    cluster.restart()
    assert rows(cluster.workers[0]) == before
    cluster.close()
