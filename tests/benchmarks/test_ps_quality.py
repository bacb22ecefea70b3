# SPDX-License-Identifier: Apache-2.0
"""Quality: equal records for all, the verdicts, and sync equals plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.ps_quality import SYNC, Difference, servers_job, torch_job

from benchmarks import jobs, ps_quality, quality_models
from fleetlight.data import Record
from fleetlight.data.records import TableDataset

pytestmark = pytest.mark.long

RECORDS = TableDataset(
    "tiny",
    Record(
        torch.arange(10.0)[:, None],
        torch.tensor([[-7, 900], [5, 900], [-7, 3], [5, 3], [8, 8]] * 2),
        torch.zeros(10),
    ),
)


def test_sync_learns_like_plain_torch() -> None:
    # generated records in the shape of the census
    flags = ["--task", "adult", "--epochs", "1", "--batch", "256"]
    alone, served = (jobs.run(make("job", flags)) for make in (torch_job, servers_job))
    reached, beside = served.results[0]["auc"], alone.results[0]["auc"]
    assert beside > 0.6
    # a different batch size or learning rate changes at least twice as much
    assert reached == pytest.approx(beside, abs=4e-4)


@pytest.mark.parametrize(
    ("more", "both_ways", "word"),
    [
        (-0.0019, False, "met"),
        (-0.0021, False, "missed"),
        (0.01, False, "met"),
        (0.0019, True, "met"),
        (0.0021, True, "missed"),
        (-0.0021, True, "missed"),
    ],
)
def test_a_gain_is_met_unless_both_must_be_equal(more: float, both_ways: bool, word: str) -> None:
    one = Difference("geo", [0.7 + more], [0.7], both_ways)
    assert one.verdict == f"0.002: {word}"


def test_the_difference_is_taken_seed_by_seed() -> None:
    one = Difference("async", [0.80, 0.70, 0.75], [0.79, 0.72, 0.75])
    assert one.seeds == pytest.approx([0.01, -0.02, 0.0])
    name, reached, more, _, each = one.row()
    assert (name, reached) == ("async", "0.7500 (0.7000..0.8000)")
    assert (more, each) == ("+0.0000 (-0.0200..+0.0100)", "+0.0100 -0.0200 +0.0000")


def test_ids_are_numbered_from_zero_and_stay_distinct() -> None:
    ids = quality_models.compact(RECORDS).columns.ids
    assert ids[:5].tolist() == [[0, 4], [2, 4], [0, 1], [2, 1], [3, 3]]


def test_a_record_is_in_the_training_or_the_test_set() -> None:
    records = quality_models.compact(RECORDS)
    parts = quality_models.split(records, seed=0)
    assert (len(parts.train), len(parts.test), parts.rows) == (8, 2, 5)
    both = [one.batch(range(len(one))).dense for one in (parts.train, parts.test)]
    assert sorted(torch.cat(both)[:, 0].tolist()) == list(range(10))
    other = quality_models.split(records, seed=1).test.batch([0, 1]).dense
    assert not torch.equal(other, both[1])


def test_equal_seeds_give_equal_first_values() -> None:
    parts = quality_models.split(quality_models.compact(RECORDS), seed=0)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(parts.model())
    one, other = (model.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not one["wide.weight"].any()


def test_files_in_subfolders_are_found_and_absent_ones_named(tmp_path: Path) -> None:
    with pytest.raises(jobs.BenchmarkError, match=r"no ratings\.csv"):
        quality_models.movielens(str(tmp_path))
    (tmp_path / "deep").mkdir()
    rows = ["userId,movieId,rating,timestamp", "3,3,4.0,100", "3,5,3.5,200"]
    (tmp_path / "deep" / "ratings.csv").write_text("\n".join(rows) + "\n")
    records = quality_models.movielens(str(tmp_path)).columns
    assert records.ids.tolist() == [[6, 7], [6, 11]]
    assert records.dense.tolist() == [[0.0], [1.0]]
    assert records.label.tolist() == [1.0, 0.0]


def test_every_mode_has_distinct_flags() -> None:
    assert SYNC in ps_quality.MODES
    assert len({tuple(flags) for flags in ps_quality.MODES.values()}) == len(ps_quality.MODES)
