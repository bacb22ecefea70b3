# SPDX-License-Identifier: Apache-2.0
"""Wait for unreachable machines, and report them to the user."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from fleetlight.launch.machines.store_connection import StoreGoneError, StoreLostError
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.screen import Screen

_LOOK_S = 0.2

_T = TypeVar("_T")


class OutOfReachError(StoreLostError):
    """The store is unreachable now; a later attempt may succeed."""


class Outage:
    """Retries operations while the store is unreachable, up to a deadline."""

    def __init__(self, name: str, longest_s: float, screen: Screen, interrupts: Interrupts) -> None:
        """`name` describes the machine that serves the store."""
        self._name, self._longest_s = name, longest_s
        self._screen, self._interrupts = screen, interrupts
        self._since: float | None = None
        self._is_told = self._once = False

    @contextlib.contextmanager
    def single_attempt(self) -> Iterator[None]:
        """Within the context, raise OutOfReachError after one failed attempt."""
        self._once = True
        try:
            yield
        finally:
            self._once = False

    def outlast(self, attempt: Callable[[], _T]) -> _T:
        """Retry until success; raise the last error at the deadline or after another interrupt."""
        interrupts = len(self._interrupts.seen)
        while True:
            began = time.monotonic()
            try:
                value = attempt()
            except StoreGoneError:
                raise
            except RuntimeError as error:
                self._failed(began, error)
                if len(self._interrupts.seen) > interrupts:
                    raise
                time.sleep(_LOOK_S)
            else:
                self._worked()
                return value

    def _failed(self, began: float, error: RuntimeError) -> None:
        if self._since is None:
            self._since = began
        elif not self._is_told:
            # the second attempt replaces a connection that only broke
            self._is_told = True
            self._screen.say(f"{self._name} is unreachable; {_waiting(self._longest_s)}")
        if time.monotonic() - self._since >= self._longest_s:
            raise error
        if self._once:
            raise OutOfReachError(str(error)) from error

    def _worked(self) -> None:
        if self._is_told and self._since is not None:
            away_s = time.monotonic() - self._since
            self._screen.say(f"{self._name} is back after {away_s:.0f} s")
        self._since, self._is_told = None, False


class SilenceReport:
    """Reports machines that send no heartbeats, and those that are back."""

    def __init__(self, longest_s: float, screen: Screen) -> None:
        self._longest_s, self._screen = longest_s, screen
        self._seen: dict[str, float] = {}

    def tell(self, silent: Mapping[str, float]) -> None:
        """Print one line for each change; `silent` maps machines to seconds without heartbeat."""
        for name in silent.keys() - self._seen.keys():
            self._screen.say(f"{name} sends no heartbeats; {_waiting(self._longest_s)}")
        for name in self._seen.keys() - silent.keys():
            self._screen.say(f"{name} is back after {self._seen[name]:.0f} s")
        self._seen = dict(silent)


def _waiting(longest_s: float) -> str:
    return f"waiting up to {longest_s:g} s for it (--deadline_s)"
