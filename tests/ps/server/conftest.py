# SPDX-License-Identifier: Apache-2.0
"""Servers that outlive their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ps.lives import Lives

from fleetlight.ps.plan import Plan


@pytest.fixture
def lives(tmp_path: Path) -> Any:
    made: list[Lives] = []

    def make(the_plan: Plan, **more: Any) -> Lives:
        made.append(Lives(tmp_path / "kept", the_plan, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()
