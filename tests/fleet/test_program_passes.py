# SPDX-License-Identifier: Apache-2.0
"""What a strategy asks of the programs of its job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetlight import DistributedStrategy
from fleetlight.fleet.program_passes import options_of
from fleetlight.static.running.options import Options


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Options()),
        ({"fetch_frequency": 3}, Options(fetch_frequency=3)),
        ({"execution_strategy": {"num_threads": 2}}, Options(num_threads=2)),
    ],
)
def test_a_strategy_says_how_programs_are_run(settings: dict[str, Any], expected: Options) -> None:
    context: Any = SimpleNamespace(strategy=DistributedStrategy(**settings))
    assert options_of(context) == expected
