# SPDX-License-Identifier: Apache-2.0
"""`LoaderCursor`: the epoch and the position of a loader, and which iteration may move them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from fleetlight.data.sources.source import RecordSource
from fleetlight.errors import CheckpointError, ComebackError, ConfigError

_ASK = (
    "this worker restarted or joined, and resumes in epoch {epoch}, but the script starts with the "
    "first one; write: for epoch in range(loader.epoch, epochs)"
)


class LoaderCursor:
    """The source may be further than the cursor: torch loads batches early."""

    def __init__(self, source: RecordSource, seed: int) -> None:
        self._source = source
        self.seed, self.epoch = seed, 0
        #: the position after the batch handed out last, and the one before it
        self.position = self._before = source.position
        #: the iteration that may hand out batches; a newer one, or a jump, replaces it
        self._iteration: object = None
        #: the iteration whose loop has not ended
        self._running: object = None
        #: the script must read the epoch before it iterates: it would start with the first one
        self._must_be_asked = False

    @property
    def consumed(self) -> int:
        """Records before the position."""
        return int(self.position["consumed"])

    @property
    def is_being_read(self) -> bool:
        """True during a loop over the loader."""
        return self._running is not None and self._running is self._iteration

    # -- epochs

    def ask_epoch(self) -> int:
        """The epoch that the next iteration starts or continues, for the script."""
        self._must_be_asked = False
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch at the next iteration. A position just loaded in it stays."""
        if epoch < self.epoch:
            self.check_asked()
        self._must_be_asked = False
        if self._iteration is not None or epoch != self.epoch:
            self.enter(epoch)

    def enter(self, epoch: int) -> None:
        """Move to the start of an epoch."""
        self.epoch, self._iteration = epoch, None
        self._source.position = {}
        self.position = self._source.position

    # -- iterations

    def start_loop(self) -> None:
        """A loop starts: after an iteration that was broken off comes the next epoch."""
        self.check_asked()
        if self._iteration is not None:
            self.enter(self.epoch + 1)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[object]:
        """The block in which this iteration alone may hand out batches."""
        me = self._iteration = self._running = object()
        try:
            yield me
        finally:
            if self._running is me:
                self._running = None

    def is_current(self, iteration: object) -> bool:
        """False once another iteration or a jump has replaced this one."""
        return self._iteration is iteration

    def check_current(self, iteration: object) -> None:
        """ConfigError for an iteration that continues after another one started."""
        if not self.is_current(iteration):
            raise ConfigError(
                "this loader was restarted while it was being iterated; for two iterations at "
                "once call fleet.shard twice"
            )

    def rewind(self) -> None:
        """Go to where the source starts to deal out records."""
        self.position = self._source.position

    def advance(self, position: dict[str, Any]) -> None:
        """Move past the batch that is handed out now."""
        self._before, self.position = self.position, position

    def put_back(self) -> None:
        """Move before the batch handed out last: it was not trained on."""
        self.position = self._before
        self._source.put_back(self._before)

    # -- state

    def state(self) -> dict[str, Any]:
        """The epoch, and how far into it all workers together are."""
        order = self._source.order_name
        return {"epoch": self.epoch, "seed": self.seed, "order": order, **self.position}

    def shared_state(self) -> dict[str, Any]:
        """The state for a checkpoint, from which any number of workers can resume."""
        return {**self.state(), **self._source.shared(self.position)}

    def resume_state(self) -> dict[str, Any]:
        """The state of this worker, for `resume`; "broken_off": its loop ended early."""
        is_broken_off = self._iteration is not None and not self.is_being_read
        return {**self.state(), "broken_off": is_broken_off}

    def load(self, state: Mapping[str, Any]) -> None:
        """Move to a state; the next iteration continues its epoch."""
        state = self._source.adapted(state)
        missing = {"epoch", "seed", "order", *self._source.position} - set(state)
        if missing:
            raise CheckpointError(f"a loader's position lacks {sorted(missing)}, got {dict(state)}")
        if state["consumed"]:
            self._check_order(state)
        self._source.position = state
        self.position = self._source.position
        self.epoch, self.seed = int(state["epoch"]), int(state["seed"])
        self._iteration = None
        if self._source.is_at_end(self.position):
            # saved after the last batch: the epoch is done
            self.enter(self.epoch + 1)

    def _check_order(self, state: Mapping[str, Any]) -> None:
        """CheckpointError for a position within an epoch of another order."""
        saved, here = state["order"], self._source.order_name
        if saved != here:
            raise CheckpointError(
                f"got a position after {state['consumed']} records of an epoch in the order "
                f"{saved!r}, but this loader has the order {here!r}, in which other records are "
                "left; make the loader with the files and settings of that run, or change them "
                "between two epochs"
            )

    def resume(self, state: Mapping[str, Any], *, must_be_asked: bool = True) -> None:
        """Move to a state of which the script does not know.

        `must_be_asked`: the script must read the epoch, since it would start with the first one.
        """
        self.load(state)
        if state.get("broken_off") and self.epoch == int(state["epoch"]):
            self._iteration = object()
        self._must_be_asked = must_be_asked and self.epoch > 0

    def check_asked(self) -> None:
        """ComebackError for a script that would start with the first epoch."""
        if self._must_be_asked:
            raise ComebackError(_ASK.format(epoch=self.epoch))
