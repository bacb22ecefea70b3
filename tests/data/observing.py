# SPDX-License-Identifier: Apache-2.0
"""An observer of a loader that calls the functions of a test."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetlight.data.observer import BatchShare, NoObserver


class Observing(NoObserver):
    """Forwards each call to one of the functions."""

    def __init__(
        self,
        shares: Callable[[BatchShare | None], Any] = lambda share: None,
        announce: Any = None,
        between: Callable[[], Any] = lambda: None,
        follow: Any = None,
    ) -> None:
        self._shares, self._announce = shares, announce
        self._between, self._follow = between, follow

    def start_iteration(self) -> None:
        if self._follow is not None:
            self._follow.start_iteration()

    def set_share(self, share: BatchShare | None) -> Any:
        return self._shares(share)

    def before_batch(self, position: Mapping[str, Any]) -> None:
        if self._follow is not None:
            self._follow.before_batch(position)

    def between_batches(self) -> None:
        self._between()

    def batches_ahead(self) -> int:
        return 0 if self._announce is None else self._announce.batches_ahead()

    def announce(self, batches: Sequence[Any]) -> None:
        getattr(self._announce, "announce", self._announce)(batches)
