# SPDX-License-Identifier: Apache-2.0
"""`EncryptedGroup`: torch's interface of a process group over `Links`.

A thread of the group runs the operations one after another in the order of calls, as Gloo does.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.encrypted import collectives as sums
from fleetlight.collective.encrypted.links import ENCRYPTED, LinkError, Links
from fleetlight.collective.encrypted.mesh import Mesh
from fleetlight.security.context import Contexts

_END_S = 5.0
_SLOT = torch.int64

_COMBINE: dict[Any, sums.Combine] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.BAND: Tensor.bitwise_and_,
    dist.ReduceOp.BOR: Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: Tensor.bitwise_xor_,
}


class EncryptedWork(dist.Work):
    """An operation that the thread of the group runs."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._future: Future[list[Tensor]] = Future()
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def end(self, failure: BaseException | None) -> None:
        """Complete the operation, or record its failure."""
        self._failure = failure
        self._done.set()
        if failure is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(failure)  # type: ignore[arg-type]

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the operation; every wait inside it has a deadline."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        """True when the operation has ended."""
        return self._done.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        """A future of its outputs."""
        return self._future


class EncryptedGroup(dist.ProcessGroup):
    """The methods are those of torch's interface, with its names and arguments."""

    def __init__(
        self, links: Links, name: str, rank: int, members: Sequence[int], limit_s: float
    ) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._mesh = Mesh(links, name, rank, members, limit_s)
        self._queue: queue.SimpleQueue[tuple[EncryptedWork, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fleet-tls-group", daemon=True)
        self._thread.start()

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return ENCRYPTED

    def shutdown(self) -> None:
        """End the threads and close the connections; twice is fine."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
        self._mesh.close()

    def abort(self) -> None:
        """End every wait."""
        self._mesh.interrupt()

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> EncryptedWork:
        """Reduce tensors over all members, in place."""
        tensors = _listed(tensors)
        op = _op(opts)
        return self._do(tensors, lambda: [self._all_reduce(t, op) for t in tensors])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> EncryptedWork:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> EncryptedWork:
        """Give the tensors of the root to all."""
        tensors, root = _listed(tensors), _root(opts)
        return self._do(tensors, lambda: [self._broadcast(t, root) for t in tensors])

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> EncryptedWork:
        """Reduce tensors on the root."""
        tensors, root, op = _listed(tensors), _root(opts), _op(opts)

        def act() -> None:
            for tensor in tensors:
                flat = _Flat(tensor)
                sums.reduce(self._mesh, flat.values, _COMBINE[op], root)
                if self.rank() == root:
                    flat.give_back(self.size() if op == dist.ReduceOp.AVG else 1)

        return self._do(tensors, act)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> EncryptedWork:
        """Gather the tensors of all members on all."""
        outputs, inputs = _lists(outputs), _listed(inputs)

        def act() -> None:
            for gathered, mine in zip(outputs, inputs, strict=True):
                flat = [_Flat(tensor) for tensor in gathered]
                sums.all_gather(self._mesh, [f.values for f in flat], _Flat(mine).values)
                for one in flat:
                    one.give_back()

        return self._do([t for row in outputs for t in row], act)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> EncryptedWork:
        """Gather the tensors of all members into one tensor."""
        rows = list(output.view(self.size(), -1))
        return self.allgather([rows], [mine.reshape(-1)])

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> EncryptedWork:
        """Reduce lists of tensors; each member gets its part."""
        outputs, inputs, op = _listed(outputs), _lists(inputs), _op(opts)

        def act() -> None:
            for mine, parts in zip(outputs, inputs, strict=True):
                flat = _Flat(mine)
                values = [_Flat(part).values for part in parts]
                sums.reduce_scatter(self._mesh, flat.values, values, _COMBINE[op])
                flat.give_back(self.size() if op == dist.ReduceOp.AVG else 1)

        return self._do(outputs, act)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor of one row for each member; each gets its own row."""
        return self.reduce_scatter([output], [list(given.view(self.size(), *output.shape))], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> EncryptedWork:
        """Receive each member's tensor for this one."""
        outputs, inputs = _listed(outputs), _listed(inputs)

        def act() -> None:
            flat = [_Flat(tensor) for tensor in outputs]
            sent = [_Flat(tensor).values for tensor in inputs]
            sums.all_to_all(self._mesh, [f.values for f in flat], sent)
            for one in flat:
                one.give_back()

        return self._do(outputs, act)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> EncryptedWork:
        """As `alltoall`, with rows of one tensor; the sizes count rows, none: equal parts."""
        there = torch.split(output, _sizes(output_sizes, output, self.size()))
        here = torch.split(given, _sizes(input_sizes, given, self.size()))
        return self.alltoall(list(there), list(here), opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> EncryptedWork:
        """Gather the tensors of all members on the root."""
        outputs, inputs, root = _lists(outputs), _listed(inputs), _root(opts)

        def act() -> None:
            flat = [_Flat(t) for t in outputs[0]] if self.rank() == root else None
            gathered = None if flat is None else [f.values for f in flat]
            sums.gather(self._mesh, gathered, _Flat(inputs[0]).values, root)
            for one in flat or ():
                one.give_back()

        return self._do([t for row in outputs for t in row], act)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> EncryptedWork:
        """Receive this member's part of the root's tensors."""
        outputs, inputs, root = _listed(outputs), _lists(inputs), _root(opts)

        def act() -> None:
            parts = [_Flat(t).values for t in inputs[0]] if self.rank() == root else None
            flat = _Flat(outputs[0])
            sums.scatter(self._mesh, flat.values, parts, root)
            flat.give_back()

        return self._do(outputs, act)

    def barrier(self, opts: Any = None, *_: Any) -> EncryptedWork:
        """Wait until every member is here."""
        return self.allreduce([torch.zeros(1, dtype=torch.uint8)])

    def send(self, tensors: Any, to: int, tag: int = 0) -> EncryptedWork:
        """Send tensors to one member; all arrive in order, whatever their tags."""
        tensors = _listed(tensors)

        def act() -> None:
            for tensor in tensors:
                self._mesh.send(to, _Flat(tensor).values).wait()

        return self._do(tensors, act)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> EncryptedWork:
        """Receive tensors of one member."""
        tensors = _listed(tensors)

        def act() -> None:
            for tensor in tensors:
                flat = _Flat(tensor)
                self._mesh.receive(source, flat.values)
                flat.give_back()

        return self._do(tensors, act)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, op)
            return
        flat = _Flat(tensor)
        sums.all_reduce(self._mesh, flat.values, _COMBINE[op])
        flat.give_back(self.size() if op == dist.ReduceOp.AVG else 1)

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> None:
        """Gather the indices and values of all members, and add them."""
        if op != dist.ReduceOp.SUM:
            raise LinkError(f"all_reduce of a sparse tensor: got {op}, expected SUM")
        mine = tensor.coalesce()
        counts = [torch.zeros(1, dtype=_SLOT) for _ in range(self.size())]
        sums.all_gather(self._mesh, counts, torch.tensor([mine.indices().shape[1]]))
        indices = [mine.indices().new_empty(mine.indices().shape[0], int(n)) for n in counts]
        values = [mine.values().new_empty(int(n), *mine.values().shape[1:]) for n in counts]
        for gathered, own in ((indices, mine.indices()), (values, mine.values())):
            flat = [t.view(-1) for t in gathered]
            sums.all_gather(self._mesh, flat, own.contiguous().view(-1))
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        flat = _Flat(tensor)
        sums.broadcast(self._mesh, flat.values, root)
        flat.give_back()

    def _do(self, outputs: Sequence[Tensor], act: Callable[[], object]) -> EncryptedWork:
        work = EncryptedWork(outputs)
        self._queue.put((work, act))
        return work

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            work, act = task
            if self._failure is None:
                try:
                    with torch.no_grad():
                        act()
                except Exception as error:
                    # the members are out of step now; all later operations fail
                    self._failure = error
            work.end(self._failure)
            del task, work, act


class _Flat:
    """A tensor as flat contiguous real values: its own memory where that is possible."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
        self._is_own = self._tensor.is_contiguous()
        self.values = self._tensor.contiguous().view(-1)

    def give_back(self, divisor: int = 1) -> None:
        """Write the values back into the tensor."""
        if divisor != 1:
            self.values.div_(divisor)
        if not self._is_own:
            self._tensor.copy_(self.values.view(self._tensor.shape))


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _lists(tensors: Any) -> list[list[Tensor]]:
    rows = list(tensors)
    return [rows] if rows and isinstance(rows[0], Tensor) else [list(row) for row in rows]


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    found = next((known for known in _COMBINE if op == known), None)
    if found is None:
        raise LinkError(f"a reduction by {op} does not work inside TLS; use SUM, MIN, MAX or AVG")
    return found


def _sizes(asked: Sequence[int], tensor: Tensor, members: int) -> list[int]:
    return list(asked) or [len(tensor) // members] * members


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


#: the connections of this job; torch calls `_made` without arguments of ours
_open: list[Links] = []


def open_links(index: int, address: str, tls: Contexts) -> Links:
    """Listen at this worker's address, and register the backend with torch."""
    if ENCRYPTED not in dist.Backend.backend_list:
        dist.Backend.register_backend(ENCRYPTED, _made, extended_api=True, devices="cpu")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    links = Links(index, listener, as_server=tls.as_server, as_client=tls.as_client)
    _open[:] = [links]
    return links


def _made(options: Any, _: Any) -> EncryptedGroup:
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    limit_s = options.timeout.total_seconds()
    return EncryptedGroup(_open[0], options.group_id, options.group_rank, members, limit_s)
