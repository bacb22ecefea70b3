# SPDX-License-Identifier: Apache-2.0
"""A file system whose changes a test observes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.checkpoint.states import WatchedOs, uninstall

Observer = Callable[[int, str, tuple[Any, ...]], None]


@pytest.fixture
def watched_os() -> Iterator[Callable[[Observer], None]]:
    """A function that installs an observer, which is called before each change of the disk."""
    yield lambda observer: WatchedOs(observer).install()
    uninstall()
