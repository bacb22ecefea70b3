# SPDX-License-Identifier: Apache-2.0
"""A disk under observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.checkpoint.states import WatchedOs, uninstall

Observer = Callable[[int, str, tuple[Any, ...]], None]


@pytest.fixture
def watched_os() -> Iterator[Callable[[Observer], None]]:
    """A function that has each call that changes the disk told to its argument first."""
    yield lambda observer: WatchedOs(observer).install()
    uninstall()
