# SPDX-License-Identifier: Apache-2.0
"""How tests pin an error: its class, what it names, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def refuses(kind: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of exactly this class, whose text has each of these words."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.type is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def error_text(
    kind: type[Exception], function: Callable[..., Any], *args: Any, **named: Any
) -> str:
    """The text of the error of this class that the call raises."""
    with pytest.raises(kind) as caught:
        function(*args, **named)
    return str(caught.value)
