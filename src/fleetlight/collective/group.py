# SPDX-License-Identifier: Apache-2.0
"""`Group`: the collective operations of the workers; each wait has a name and a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fleetlight.collective.communication_cost import meter_of
from fleetlight.collective.encrypted.links import ENCRYPTED, Links
from fleetlight.collective.membership.diagnosis import PeerConnectionError
from fleetlight.collective.membership.liveness import Liveness
from fleetlight.collective.membership.rendezvous import close_tunnels
from fleetlight.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    PeerError,
    PlanError,
)
from fleetlight.observe.log import logger
from fleetlight.roles.members import MemberHello
from fleetlight.torch_compat.c10d import broadcast_coalesced, keep_groups_in_child
from fleetlight.torch_compat.tensors import assign, distinct_elements
from fleetlight.wire.forking import kept_from_children

#: how long a finished worker keeps its connections, so that messages in flight arrive
_LINGER_S = 2.0
_POLL_S = 0.02
#: how long worker 0 waits for the last key of workers that have departed
_LAST_KEY_S = 10.0
#: how long a worker may be silent before the others no longer wait for it at the end
_SILENCE_S = 5.0

#: the most of a worker's state in one message; the deadline is that of a message
_MESSAGE_BYTES = 64 << 20

_NETWORK_ERROR = re.compile(r"/gloo/\S+:\d+\]|\b(connection|timed out|timeout)\b", re.IGNORECASE)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


#: groups of some of the workers
Parts = tuple[tuple[int, ...], ...]


def _relayed(kind: type[Exception]) -> type[Exception]:
    """A class of the same name and kind for errors that another worker causes."""
    return type(kind.__name__, (kind, PeerError), {"__doc__": kind.__doc__})


_RELAYED = {
    kind.__name__: _relayed(kind) for kind in (CheckpointError, CorruptCheckpointError, PlanError)
}


class Group:
    """This worker's view of all workers. A worker alone sends nothing."""

    def __init__(
        self,
        *,
        index: int = 0,
        hellos: Mapping[int, MemberHello] | None = None,
        liveness: Liveness | None = None,
        deadline_s: float = 300.0,
        device: torch.device | None = None,
        backend: str = "gloo",
        control: dist.ProcessGroup | None = None,
        owned: bool = True,
        links: Links | None = None,
    ) -> None:
        """`control` carries tensors in main memory, where the process group of all cannot.

        `owned`: `leave` closes the process group. `links` are the TLS connections under it, where
        workers of several hosts use TLS.
        """
        self.index = index
        self.hellos = hellos or {}
        self.size = max(1, len(self.hellos))
        self.liveness = liveness
        #: counts what communication costs this worker
        self.meter = meter_of(self.hellos, index)
        self.deadline_s = deadline_s
        self.device = device or torch.device("cpu")
        self.backend = backend
        self._control = control
        self._owned = owned
        self._links = links
        self._barriers = 0
        self._communicators: list[dist.ProcessGroup] = []
        #: process groups of some of the workers: all of them, and those that are free
        self._acquired: list[dist.ProcessGroup] = []
        self._free: dict[tuple[Parts, int], list[list[dist.ProcessGroup]]] = {}
        if self.size > 1:
            self._communicators.append(world())

    @property
    def alone(self) -> bool:
        """True in a job of one worker."""
        return self.size == 1

    @property
    def is_encrypted(self) -> bool:
        """True when workers of several hosts send inside TLS."""
        return self._links is not None

    def communicators(self, count: int) -> list[dist.ProcessGroup]:
        """This many process groups of all workers; more than one lets buckets overlap."""
        while len(self._communicators) < count:
            with kept_from_children():
                extra = dist.new_group(timeout=timedelta(seconds=self.deadline_s))
            self._communicators.append(extra)
        return self._communicators[:count]

    def acquire(self, parts: Parts, count: int = 1) -> list[dist.ProcessGroup]:
        """Process groups of the part with this worker, for tensors in main memory.

        They belong to the caller until `release`. All workers call both with the same parts. A
        worker that is in no part gets none.
        """
        if free := self._free.get((parts, count)):
            return free.pop()
        with self.named("opening process groups"), kept_from_children():
            made = [(part, self._opened(part)) for part in parts for _ in range(count)]
        mine = [group for part, group in made if self.index in part]
        self._acquired += mine
        return mine

    def release(self, parts: Parts, count: int, groups: list[dist.ProcessGroup]) -> None:
        """Keep acquired process groups for the next call with the same parts."""
        self._free.setdefault((parts, count), []).append(groups)

    def _opened(self, part: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(part), timedelta(seconds=self.deadline_s), ENCRYPTED if self._links else "gloo"
        )
        return group

    def __deepcopy__(self, memo: object) -> Group:
        # a copied module stays with the group of the original
        return self

    @contextlib.contextmanager
    def named(self, operation: str) -> Iterator[None]:
        """Make errors of torch's collectives in the block name the worker that caused them."""
        if self.liveness is None:
            yield
            return
        try:
            with self.liveness.waiting(operation), self.meter.waiting():
                yield
        except RuntimeError as error:
            if not is_network_error(error):
                raise
            raise self.liveness.explain(error, operation) from None

    def report_step(self, step: int) -> None:
        """Record the number of steps that this worker has made, for errors."""
        if self.liveness is not None:
            self.liveness.step = step

    def _carrier(self, tensor: Tensor) -> dist.ProcessGroup:
        """The process group for the device of a tensor."""
        return self._control if self._control and tensor.device.type == "cpu" else world()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over all workers, in place."""
        if op not in _OPS:
            raise ConfigError(f"all_reduce: got op={op!r}, expected one of {', '.join(_OPS)}")
        if not self.alone:
            with self.named(f"all_reduce({op})"):
                dist.all_reduce(tensor, _OPS[op], self._carrier(tensor))
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all workers in order; all have one type and shape."""
        if self.alone:
            return [tensor.clone()]
        gathered = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        with self.named("all_gather"):
            dist.all_gather(gathered, tensor.contiguous(), self._carrier(tensor))
        return gathered

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Give worker 0's values to all workers, in place, in few messages."""
        if self.alone or not tensors:
            return
        with self.named(operation), torch.no_grad():
            once = [distinct_elements(tensor) for tensor in tensors]
            sent = [tensor.contiguous() for tensor in once]
            broadcast_coalesced(self._carrier(tensors[0]), sent, 250 << 20, 0)
            for mine, arrived in zip(once, sent, strict=True):
                if mine is not arrived:
                    assign(mine, arrived)

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """The bytes of all workers, in order, on all workers."""
        if self.alone:
            return [data]
        with self.named(operation):
            sizes = self._sizes(len(data))
            mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
                : len(data)
            ]
            gathered = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(gathered, mine, self._carrier(mine))
        return [bytes(t[:n].numpy()) for t, n in zip(gathered, sizes, strict=True)]

    def bytes_to_first(self, data: bytes, operation: str) -> list[bytes]:
        """The bytes of all workers, in order, on worker 0; an empty list on the others.

        For large data: each worker's bytes cross the network once.
        """
        if self.alone:
            return [data]
        with self.named(operation):
            sizes = self._sizes(len(data))
            if self.index == 0:
                return [data, *(self._received(i, n) for i, n in enumerate(sizes) if i)]
            for start in range(0, len(data), _MESSAGE_BYTES):
                part = bytearray(data[start : start + _MESSAGE_BYTES])
                sent = torch.frombuffer(part, dtype=torch.uint8)
                dist.send(sent, 0, self._carrier(sent))
        return []

    def _sizes(self, mine: int) -> list[int]:
        """The number of bytes of each worker."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.index] = mine
        dist.all_reduce(sizes, group=self._carrier(sizes))
        found: list[int] = sizes.tolist()
        return found

    def _received(self, index: int, size: int) -> bytes:
        """Receive `size` bytes from another worker."""
        buffer = torch.empty(size, dtype=torch.uint8)
        for start in range(0, size, _MESSAGE_BYTES):
            dist.recv(buffer[start : start + _MESSAGE_BYTES], index, self._carrier(buffer))
        return buffer.numpy().tobytes()

    def broadcast_bytes(self, data: bytes, operation: str) -> bytes:
        """Worker 0's bytes, on all workers."""
        if self.alone:
            return data
        with self.named(operation):
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, self._carrier(size))
            buffer = torch.zeros(max(1, int(size)), dtype=torch.uint8)
            if self.index == 0 and data:
                buffer[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, 0, self._carrier(buffer))
        return bytes(buffer[: int(size)].numpy())

    def assemble(self, operation: str) -> None:
        """Wait until every worker has called `operation`, without sending a tensor.

        A collective that only some workers call would pair with the next messages of the others.
        So a barrier in the store comes first, and an error names the absent workers.
        """
        self._barrier(operation, working=False)

    def _barrier(self, operation: str, *, working: bool) -> None:
        if self.liveness is not None:
            self._barriers += 1
            barrier = f"{operation}/{self._barriers}"
            self.liveness.barrier(barrier, operation, self.deadline_s, working=working)

    def together(self, action: Callable[[], None] | None, operation: str) -> None:
        """Run an action that may fail on some workers; a failure raises on all of them.

        It may take longer than the deadline on some: the others wait while those send heartbeats.
        """
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except Exception as error:
            failure = error
        self._barrier(operation, working=True)
        texts = self.gather_bytes(_encode_failure(failure), operation)
        if failure is not None:
            raise failure
        for index, text in enumerate(texts):
            if text:
                raise _decode_failure(text.decode(), index)

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until all workers have called it."""
        if not self.alone:
            with self.named(operation):
                # gloo's own barrier names a missing worker no better than a reduction does
                one = torch.zeros(1)
                dist.all_reduce(one, group=self._carrier(one))

    def leave(self) -> None:
        """Depart without an error: let messages in flight arrive, then close the connections."""
        if self.liveness is None:
            return
        self._log_cost()
        self.liveness.depart(None)
        self._await_others(_LINGER_S)
        self._close_connections()
        if self.index == 0:
            # worker 0 serves the store, which the others use until they end
            self._await_others(self.deadline_s)
            self._await(self.liveness.all_left, _LAST_KEY_S)
        self.liveness.release_store()
        close_tunnels()

    def _log_cost(self) -> None:
        # with NCCL the CPU waits for the GPU, not for the other workers
        cost = self.meter.cost().sentence(waits=self.backend != "nccl")
        if cost and self.index == 0:
            logger.info("%s", cost)

    def _close_connections(self) -> None:
        """Close the connections of this object; the script may own the process group."""
        made = [*self._communicators[1:], *self._acquired, self._control]
        self._communicators.clear()
        self._acquired.clear()
        self._free.clear()
        self._control = None
        with contextlib.ExitStack() as ending:
            if self._links is not None:
                ending.callback(self._links.close)
            if dist.is_initialized():
                self._close_groups(made)

    def _close_groups(self, made: list[dist.ProcessGroup | None]) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            if self._owned:
                dist.destroy_process_group()
            else:
                for group in filter(None, made):
                    dist.destroy_process_group(group)

    def fail(self, error: str, *, consequence: bool = False) -> None:
        """Depart with an error; the end of the process closes the connections.

        `consequence`: this worker has failed because another one did.
        """
        if self.liveness is not None:
            self.liveness.depart(error)
            if consequence and self.index == 0:
                # workers that wait for the same one are about to read the store, which worker 0
                # serves; without it they would blame worker 0
                self._await_others(_LINGER_S)
            self.liveness.release_store()

    def _await_others(self, at_most_s: float) -> None:
        """Wait until all have departed, or the others send no heartbeat."""
        liveness = self.liveness
        assert liveness is not None
        self._await(lambda: liveness.all_gone() or not liveness.any_alive(_SILENCE_S), at_most_s)

    def _await(self, condition: Callable[[], bool], at_most_s: float) -> None:
        end = time.monotonic() + at_most_s
        with contextlib.suppress(RuntimeError):
            while not condition() and time.monotonic() < end:
                time.sleep(_POLL_S)


def world() -> dist.ProcessGroup:
    """The process group of all workers."""
    group = dist.group.WORLD
    assert group is not None, "the process group is formed before anything is sent"
    return group


def _encode_failure(failure: Exception | None) -> bytes:
    return f"{type(failure).__name__}:{failure}".encode() if failure is not None else b""


def _decode_failure(text: str, index: int) -> Exception:
    kind, _, message = text.partition(":")
    if kind in _RELAYED:
        return _RELAYED[kind](f"on worker {index}: {message}")
    return _RELAYED["CheckpointError"](f"on worker {index}: {kind}: {message}")


def is_network_error(error: BaseException) -> bool:
    """True for what gloo, NCCL and the store raise when a peer or the network fails."""
    # NCCL and the store raise types of their own. Gloo raises plain RuntimeErrors without an errno;
    # a file name of gloo tells them from torch's errors about wrong arguments.
    if isinstance(error, (dist.DistError, PeerConnectionError)):
        return True
    return _NETWORK_ERROR.search(str(error)) is not None


os.register_at_fork(after_in_child=keep_groups_in_child)
