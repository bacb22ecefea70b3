# SPDX-License-Identifier: Apache-2.0
"""Servers that a test crashes and restarts."""

from pathlib import Path
from typing import Any

import pytest
from tests.ps.restartable import RestartableCluster

from fleetlight.ps.plan import Plan


@pytest.fixture
def make_cluster(tmp_path: Path) -> Any:
    clusters: list[RestartableCluster] = []

    def make(the_plan: Plan, **more: Any) -> RestartableCluster:
        clusters.append(RestartableCluster(tmp_path / "kept", the_plan, **more))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
