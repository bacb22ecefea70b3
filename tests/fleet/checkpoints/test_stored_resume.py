# SPDX-License-Identifier: Apache-2.0
"""Jobs that save automatically under a URL, and resume from it."""

from pathlib import Path

import pytest
from tests.fleet.checkpoints.test_autosave import resume_job, run, stop, whole

from fleetlight import checkpoint

pytestmark = pytest.mark.multiprocess


def test_stop_and_resume_equal_an_uninterrupted_job_bit_for_bit(tmp_path: Path) -> None:
    expected = run(whole, 2, str(tmp_path / "unused"))
    url = (tmp_path / "run").as_uri()
    before = run(stop, 2, url, 4)
    assert 4 <= checkpoint.read(url).manifest.step < 12
    after = run(resume_job, 2, url)
    for uninterrupted, mine, rest in zip(expected, before, after, strict=True):
        assert uninterrupted[0] == rest[0]
        assert uninterrupted[1] == rest[1] == 12
        assert uninterrupted[2] == mine + rest[2]
