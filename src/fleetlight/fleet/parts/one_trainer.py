# SPDX-License-Identifier: Apache-2.0
"""`OneTrainer`: a worker trains in one thread at a time, whatever others read meanwhile."""

from __future__ import annotations

import threading

from fleetlight.errors import PlanError


class OneTrainer:
    """Knows which thread is inside a step of this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A step begins; PlanError while one of another thread goes on."""
        me = threading.current_thread()
        with self._lock:
            other = self._thread
            # a thread may have died amid its step
            if other is not None and other is not me and other.is_alive():
                raise PlanError(
                    f"optimizer.step was called by thread {me.name} while thread {other.name} was "
                    "inside optimizer.step, expected one step of a worker at a time: two threads "
                    "that train mix their gradients; train in one thread (others may call the "
                    "model under torch.no_grad()), hold a lock of your own from forward to step, "
                    "or start more workers (fleetrun --worker_num)"
                )
            self._thread = me

    def end(self) -> None:
        """The step is over."""
        self._thread = None
