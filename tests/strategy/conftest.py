# SPDX-License-Identifier: Apache-2.0
"""An environment without tuning variables."""

import pytest

from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.strategy import variables_of


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that give settings their defaults."""
    for variable in variables_of(DistributedStrategy):
        monkeypatch.delenv(variable, raising=False)
