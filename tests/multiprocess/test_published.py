# SPDX-License-Identifier: Apache-2.0
"""A job whose processes die and restart publishes every change that reached its servers."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight.serve import Reader

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("published.py"))


@pytest.mark.gate
def test_publications_survive_a_restarted_server_and_a_restarted_worker(tmp_path: Path) -> None:
    job = ["--server_num", "2", "--worker_num", "2", "--max_restarts", "9", "--tee"]
    codes, text = finish([start([str(BIN / "fleetrun"), *job, SCRIPT], cwd=tmp_path)])
    assert codes == [0], text
    assert re.findall(r"PUBLISHED (\d+) (\d+) (\w+) (\d+) (\d+) (\w+)", text) == [
        ("2", "1", "base", "2", "1", "True"),
        ("3", "2", "delta", "3", "1", "True"),
        # server 1 was restarted, and knows no changes
        ("5", "3", "base", "5", "1", "True"),
        ("6", "4", "delta", "6", "1", "True"),
        # worker 0 was restarted, and took over the lease of its job
        ("8", "5", "base", "8", "2", "True"),
    ], text
    # the last publication is made when training ends
    with Reader(tmp_path / "target", cache=tmp_path / "cache2", follow=False) as reader:
        assert (reader.number, reader.step) == (6, 9)
        total = reader.lookup("rows", np.arange(40)).sum()
    # each record is counted once, and workers share each step
    assert total == pytest.approx(-36)
