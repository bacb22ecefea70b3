# SPDX-License-Identifier: Apache-2.0
"""A folder in which tests start jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.workplace import Workplace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A workplace that kills its remaining jobs."""
    workplace = Workplace(tmp_path)
    yield workplace
    for job in workplace.jobs:
        job.process.kill()
        with job.process:  # reads no more output, but reaps the process and closes the pipe
            pass
