# SPDX-License-Identifier: Apache-2.0
"""A job whose processes are all killed at once resumes, and every record counts once."""

from pathlib import Path

import pytest
from tests.chaos.killing import MODES
from tests.chaos.whole import chaos

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


@pytest.mark.gate
@pytest.mark.long
def test_each_record_counts_once_when_all_processes_are_killed(tmp_path: Path) -> None:
    outcome = chaos(tmp_path, "async", kills=1, seed=1)
    assert (outcome.kills, outcome.resumed) == (1, 1)
    assert outcome.counted > 1000


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_each_record_counts_once_in_every_mode(tmp_path: Path, mode: str) -> None:
    assert chaos(tmp_path, mode, kills=3, seed=7).counted > 1000


@pytest.mark.long
def test_each_record_of_a_shard_queue_counts_once(tmp_path: Path) -> None:
    assert chaos(tmp_path, "async", kills=3, seed=5, deal="queue").counted > 1000


@pytest.mark.long
def test_log_is_exact_beside_saved_checkpoints(tmp_path: Path) -> None:
    assert chaos(tmp_path, "async", kills=3, seed=2, saves=True).counted > 1000
