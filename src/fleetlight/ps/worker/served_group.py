# SPDX-License-Identifier: Apache-2.0
"""`ServedGroup`: barriers and collectives of workers with parameter servers, through server 0.

It has the methods of a collective group, so barriers, metrics and checkpoints work with both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.errors import (
    ConfigError,
    DeadlineError,
    MembershipError,
    PeerError,
    PeerLostError,
)
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.ps import message_base
from fleetlight.ps import messages as m
from fleetlight.ps.message_base import error_of, failure_of
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, HEARTBEAT
from fleetlight.ps.worker.joining import KnownBarriers
from fleetlight.torch_compat.tensors import assign

_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
#: seconds between heartbeats
_HEARTBEAT_S = 1.0
#: the deadline of a barrier that lasts as long as its members live
_LONG_S = 1e9
#: how long the reply may take after the deadline, which the server watches
_GRACE_S = 30.0


class ServedGroup:
    """This worker's view of all workers."""

    backend = "sockets"

    def __init__(
        self, client: Client, deadline_s: float, device: torch.device | None = None
    ) -> None:
        self.client = client
        self.index = client.worker
        self.size = client.worker_num
        self.deadline_s = deadline_s
        self.device = device or torch.device("cpu")
        self.hellos: Mapping[int, Any] = {}
        #: the worker's step, sent with its heartbeats
        self.step = 0
        #: the barriers of the others, until a worker that joins takes part in them
        self.prelude: KnownBarriers | None = None
        #: called before each barrier; raises in a worker that has left
        self.check_stays: Callable[[], None] = lambda: None
        #: called when a barrier is impossible because other workers have left
        self.when_left_alone: Callable[[MembershipError], None] | None = None
        self._over = threading.Event()
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name="fleet-beat", daemon=True
        )
        for lane in (CONTROL, HEARTBEAT):
            client.open_lane(lane)
        self._heartbeats.start()

    @property
    def alone(self) -> bool:
        """True for the only worker of a job."""
        return self.client.is_alone

    def report_step(self, step: int) -> None:
        """Set the step that heartbeats report."""
        self.step = step

    def __deepcopy__(self, memo: object) -> ServedGroup:
        return self

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """Return the bytes of all workers, in worker order, on every worker."""
        return self._exchange(data, operation, self.deadline_s)

    def bytes_to_first(self, data: bytes, operation: str) -> list[bytes]:
        """Return the bytes of all workers, in worker order, on worker 0; nothing elsewhere."""
        gathered = self.gather_bytes(data, operation)
        return gathered if self.index == 0 else []

    def _exchange(self, data: bytes, operation: str, deadline_s: float) -> list[bytes]:
        if self.alone:
            return [data]
        self.check_stays()
        replies = self.client.replies

        def exchange() -> list[bytes]:
            known = self.prelude.take(operation) if self.prelude is not None else None
            if known is not None:
                return known
            replies.meetings += 1
            message = m.Barrier(replies.meetings, operation, deadline_s)
            payload = np.frombuffer(data, np.uint8)
            # the server watches the deadline, since it can name who is missing
            reply = self.client.ask(CONTROL, {0: (message, [payload])}, deadline_s + _GRACE_S)[0]
            return [array.tobytes() for array in reply.arrays]

        try:
            with step_times.part(WAIT):
                return list(replies.once(operation, exchange))
        except MembershipError as error:
            if self.when_left_alone is not None:
                self.when_left_alone(error)
            raise

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all workers, in worker order; equal in dtype and shape."""
        if self.alone:
            return [tensor.clone()]
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        parts = self.gather_bytes(flat.numpy().tobytes(), "all_gather")
        return [
            torch.frombuffer(bytearray(part), dtype=tensor.dtype)
            .reshape(tensor.shape)
            .to(tensor.device)
            if part
            else tensor.new_empty(tensor.shape)
            for part in parts
        ]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over all workers, in place."""
        if op not in _OPS:
            raise ConfigError(f"all_reduce: got op={op!r}, expected one of {', '.join(_OPS)}")
        if not self.alone:
            tensor.copy_(_OPS[op](torch.stack(self.all_gather(tensor))))
        return tensor

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Copy worker 0's values into the tensors of every worker."""
        if self.alone or not tensors:
            return
        for tensor in tensors:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            mine = flat.numpy().tobytes() if self.index == 0 else b""
            data = self.broadcast_bytes(mine, operation)
            if data:
                values = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
                with torch.no_grad():
                    assign(tensor, values.reshape(tensor.shape))

    def broadcast_bytes(self, data: bytes, operation: str) -> bytes:
        """Return worker 0's bytes on every worker."""
        return self.gather_bytes(data if self.index == 0 else b"", operation)[0]

    def assemble(self, operation: str) -> None:
        """Wait until every worker has called `operation`."""
        self.gather_bytes(b"", operation)

    def barrier(self, operation: str = "barrier") -> None:
        """Wait for all workers."""
        self.gather_bytes(b"", operation)

    def together(self, action: Callable[[], None] | None, operation: str) -> None:
        """Run an action that may fail on some workers; a failure raises on all of them.

        It may take longer than the deadline: the other workers wait as long as those live. A
        restarted worker does not repeat an action that its previous incarnation completed.
        """
        failure: Exception | None = None
        is_done = not self.alone and self.client.replies.is_known
        try:
            if action is not None and not is_done:
                action()
        except Exception as error:
            failure = error
        payload = b"" if failure is None else message_base.encode_failure(failure_of(failure))
        texts = self._exchange(payload, operation, _LONG_S)
        if failure is not None:
            raise failure
        for index, text in enumerate(texts):
            if text:
                raise error_of(message_base.decode_failure(text), f"on worker {index}")

    def leave(self) -> None:
        """Say goodbye after a successful run; do nothing after `fail`."""
        if not self._over.is_set():
            self._over.set()
            self.client.leave()
            self._heartbeats.join(_HEARTBEAT_S)

    def fail(self, error: str, *, consequence: bool = False) -> None:
        """Report a failure to the servers, which report it to the other workers; never raise.

        The servers stay, so no process waits for this worker, whether `consequence` or not.
        """
        self._over.set()
        with contextlib.suppress(Exception):
            self.client.report_failure(error or "an error")

    def _send_heartbeats(self) -> None:
        while not self._over.wait(_HEARTBEAT_S):
            try:
                self.client.heartbeat(self.step)
            except PeerError as error:
                # the training thread gets the error too
                logger.debug("a heartbeat failed: %s", error)
                is_away = isinstance(error, (DeadlineError, PeerLostError))
                if not (is_away and self.client.may_reconnect):
                    return
