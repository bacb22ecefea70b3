# SPDX-License-Identifier: Apache-2.0
"""Repeats an operation on a store until it succeeds, cannot succeed, or a deadline passes."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from fleetlight.errors import StoreError, StoreRefusedError
from fleetlight.store.failures import Explanation

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
#: the log says why an operation still waits
_REPORT_AFTER_S = 5.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a store tries."""

    #: an operation ends after it, and after its last request
    deadline_s: float = 300.0
    #: a request with its reply
    request_s: float = 60.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 10.0


class Passing(Exception):
    """A failure that the operation itself found, and that may pass."""


def retried(
    url: str,
    operation: str,
    limits: Limits,
    act: Callable[[int], _T],
    explained: Callable[[BaseException], Explanation],
) -> _T:
    """The result of `act`, called with the number of earlier attempts."""
    began, is_reported = time.monotonic(), False
    for attempt in range(1_000_000):
        try:
            return act(attempt)
        except StoreError:
            raise
        except Exception as error:
            failure = (
                Explanation(str(error), True) if isinstance(error, Passing) else explained(error)
            )
            if not failure.passes:
                # the error of the library may contain the reply, and so the name of a key
                raise StoreRefusedError(f"{url}: could not {operation}: {failure.reason}") from None
            pause_s = _pause_s(attempt, limits)
            spent_s = time.monotonic() - began
            if spent_s + pause_s > limits.deadline_s:
                raise StoreError(
                    f"{url}: could not {operation} within {limits.deadline_s:g} s "
                    f"({attempt + 1} attempts): {failure.reason}; check the endpoint and the "
                    "network, and try again"
                ) from None
            if spent_s >= _REPORT_AFTER_S and not is_reported:
                is_reported = True
                _log.warning(
                    "%s: could not %s yet, trying for up to %g s: %s",
                    url,
                    operation,
                    limits.deadline_s,
                    failure.reason,
                )
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _pause_s(attempt: int, limits: Limits) -> float:
    """Twice as long after each attempt, and random, so that processes do not retry together."""
    longest: float = min(limits.longest_pause_s, limits.first_pause_s * 2 ** min(attempt, 20))
    return longest * random.uniform(0.5, 1.0)
