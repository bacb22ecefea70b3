# SPDX-License-Identifier: Apache-2.0
"""A few of the kills of `make chaos`."""

from pathlib import Path

import pytest
from tests.chaos.harms import HARMS
from tests.chaos.killing import chaos
from tests.chaos.moving import moved

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.mark.gate
def test_each_acknowledged_push_counts_once_after_kills(tmp_path: Path) -> None:
    outcome = chaos(tmp_path, "async", kills=3, seed=4, self_kill=True, harms=list(HARMS))
    assert len(outcome.away_s) >= 3
    assert outcome.counted > 1000


@pytest.mark.gate
def test_each_record_of_a_shard_queue_counts_once_after_kills(tmp_path: Path) -> None:
    outcome = chaos(tmp_path, "async", kills=4, seed=2, self_kill=True, deal="queue")
    assert len(outcome.away_s) >= 4
    assert outcome.counted > 1000


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_push_in_shared_memory_counts_once_after_kills(tmp_path: Path, mode: str) -> None:
    assert len(chaos(tmp_path, mode, kills=4, seed=3, width=512).away_s) >= 4
    assert "go through shared memory" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_each_push_counts_once_when_members_move(tmp_path: Path, mode: str) -> None:
    outcome = moved(tmp_path, mode, kills=4, seed=3)
    assert len(outcome.away_s) == 4
    assert outcome.counted > 1000
