# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of static programs."""

from collections.abc import Iterator

import pytest

from fleetlight.static.definition import reset_default_programs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Let each test begin with empty default programs."""
    reset_default_programs()
    yield
    reset_default_programs()
