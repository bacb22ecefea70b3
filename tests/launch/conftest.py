# SPDX-License-Identifier: Apache-2.0
"""A place to start jobs in."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from tests.launch.workplace import Workplace


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Workplace]:
    """A workplace that leaves no job behind."""
    workplace = Workplace(tmp_path)
    yield workplace
    for job in workplace.jobs:
        job.process.kill()
        with job.process:  # reads nothing more, but collects the process and closes the pipe
            pass
