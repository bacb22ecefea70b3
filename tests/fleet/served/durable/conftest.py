# SPDX-License-Identifier: Apache-2.0
"""Jobs whose worker restarts alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.restartable import RestartableJob


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., RestartableJob]]:
    """Creates jobs, each with its own folder."""
    made: list[RestartableJob] = []

    def make(*arguments: Any, **more: Any) -> RestartableJob:
        made.append(RestartableJob(tmp_path / str(len(made)), *arguments, **more))
        return made[-1]

    yield make
    for job in made:
        for server in job.servers:
            server.close()
