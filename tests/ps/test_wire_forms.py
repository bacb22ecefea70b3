# SPDX-License-Identifier: Apache-2.0
"""Narrow rows between a client and its servers, in each mode."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.kernels.batches import numbers
from tests.ps.serving import DIM, OPTIONS, Worker, ids_of, opened, plan, rows_of
from tests.ps.worker.in_process_job import InProcessJob

from fleetlight.errors import GradientError, PlanError, ProtocolError
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.plan import BF16, FP32, Plan
from fleetlight.ps.transport.protocol import MessageCodec
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.wire_forms import FORMS, FP16, INT8, as_sent
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal

NARROW = (BF16, FP16, INT8)
IDS = np.arange(40)


def narrow_plan(wire: str, mode: str = "async", **facts: Any) -> Plan:
    """The plan of `serving`, whose first table is narrow."""
    made = plan(mode, **{"workers": 1, **facts})
    users = msgspec.structs.replace(made.tables[0], wire=wire)
    return msgspec.structs.replace(made, tables=[users, made.tables[1]])


def job_with(wire: str, mode: str = "async", servers: int = 2, **facts: Any) -> InProcessJob:
    return InProcessJob(servers, mode, tables=narrow_plan(wire).tables, **facts)


def gradients(job: InProcessJob, table: int = 0, seed: int = 0) -> TableGradients:
    distinct = dedup(IDS, len(job.servers))
    return TableGradients(distinct.ids, distinct.starts, numbers(seed, len(IDS), DIM))


def push(job: InProcessJob, part: TableGradients, step: int = 0, table: int = 0) -> None:
    update = Update(0, step, OPTIONS, {table: part}, {})
    job.client.push(job.client.build_push(update, job.live), phase=0)


def stored(job: InProcessJob, ids: Any, table: int = 0) -> Any:
    """The rows as the servers have them, in the order of grouped ids."""
    distinct = dedup(ids, len(job.servers))
    tables = [server._service.state.table(table) for server in job.servers]  # type: ignore[union-attr]
    parts = [t.pull(distinct.ids[distinct.slice_of(n)], False) for n, t in enumerate(tables)]
    return np.concatenate(parts)


def arrived(job: InProcessJob, table: int = 0) -> Any:
    [rows] = job.client.pull([job.wanted(*IDS.tolist(), table=table)]).rows
    return rows


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("wire", NARROW)
def test_gradients_arrive_within_the_error_of_the_form(wire: str, mode: str) -> None:
    job = job_with(wire, mode)
    part = gradients(job)
    push(job, part)
    # the learning rate is 1 and rows start with zeros
    error = np.abs(stored(job, IDS) + part.gradients)
    bound = {BF16: 2.0**-8, FP16: 2.0**-10, INT8: 1.001 / 127}[wire]
    assert 0 < error.max() <= bound * np.abs(part.gradients).max()
    push(job, part, table=1, step=1)
    np.testing.assert_array_equal(stored(job, IDS, 1), -part.gradients)


@pytest.mark.parametrize("wire", NARROW)
def test_pulled_rows_are_those_of_the_servers_rounded(wire: str) -> None:
    job = job_with(wire)
    for step in range(3):
        push(job, gradients(job, seed=step), step)
    rows = stored(job, IDS)
    pulled = arrived(job)
    assert pulled.dtype == np.float32
    np.testing.assert_array_equal(pulled, as_sent(rows, job.plan.tables[0]))
    assert (pulled != rows).any()


@pytest.mark.parametrize("wire", NARROW)
def test_a_push_returns_prefetched_rows_in_the_same_form(wire: str) -> None:
    job = job_with(wire, "sync")
    job.client.pull([job.wanted(*IDS.tolist(), insert=False)], batch=7, lane="prefetch")
    update = Update(0, 0, OPTIONS, {0: gradients(job)}, {0: np.ones(3, np.float32)})
    values = job.client.push(job.client.build_push(update, job.live), phase=0)
    assert [(server, batch, table) for server, batch, table, _, _ in values.changed] == [
        (0, 7, 0),
        (1, 7, 0),
    ]
    changed = np.concatenate([rows for *_, rows in values.changed])
    np.testing.assert_array_equal(changed, arrived(job))
    assert [len(arrays) for arrays in values.dense.values()] == [1]


@pytest.mark.parametrize("wire", NARROW)
def test_an_exchange_adds_differences_and_returns_rows(wire: str) -> None:
    job = job_with(wire, "geo", k_steps=1)
    part = gradients(job)
    part.gradients[:] = as_sent(part.gradients, job.plan.tables[0])
    values = job.client.exchange({0: part}, {}, step=1)
    # what was counted as sent arrived, bit for bit
    np.testing.assert_array_equal(stored(job, IDS), part.gradients)
    rows = np.concatenate([rows for _, _, rows in values.pieces])
    np.testing.assert_array_equal(rows, part.gradients)


def body_bytes(wire: str, dim: int, rows: int) -> tuple[int, int]:
    """The bytes of the bodies of a push and of a pull's reply, from the frames of one server."""
    made = narrow_plan(wire)
    table = msgspec.structs.replace(made.tables[0], dim=dim)
    worker = Worker(opened(msgspec.structs.replace(made, tables=[table])), 0, workers=1)
    ids = ids_of(range(rows))
    arrays = [ids, *FORMS[wire].encode(numbers(0, rows, dim), 1, (None, None))]
    request = worker.push_request(0, {0: None}, None)
    worker.say(request, *arrays, lane="push")
    reply = worker.say(m.Pull([m.TablePull(0, True)], False), ids, lane="pull")
    return body_of(request, arrays), body_of(*reply)


def body_of(message: Any, arrays: Sequence[Any]) -> int:
    codec: MessageCodec[Any] = MessageCodec(Any)
    return codec.prefix(bytes(codec.encode(0, message, arrays)[0][:24])).body


@pytest.mark.parametrize(
    ("wire", "row"), [(FP32, 4 * 16), (BF16, 2 * 16), (FP16, 2 * 16), (INT8, 16 + 4)]
)
def test_frames_have_exactly_the_bytes_of_the_form(wire: str, row: int) -> None:
    rows = 1000
    assert body_bytes(wire, 16, rows) == (rows * (8 + row), rows * row)


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_refused(wire: str, bad: float) -> None:
    job = job_with(wire)
    part = gradients(job)
    part.gradients[5, 0] = bad
    with pytest.raises(GradientError, match="table 'users' with NaN or infinite values"):
        push(job, part)
    # a worker that does not check: the server still sees it
    apply = job_with(wire, on_nonfinite="apply")
    worker = Worker(opened(narrow_plan(wire, on_nonfinite="refuse")), 0, workers=1)
    arrays = FORMS[wire].encode(part.gradients, 1, (None, None))
    with pytest.raises(GradientError, match="pushed a gradient"):
        worker.say(worker.push_request(0, {0: None}, None), part.ids, *arrays, lane="push")
    push(apply, part)
    assert not np.isfinite(stored(apply, IDS)).all()


@pytest.mark.parametrize("wire", NARROW)
def test_gradients_beyond_the_range_are_the_largest_not_infinite(wire: str) -> None:
    job = job_with(wire)
    part = gradients(job)
    part.gradients[:] = 70000.0
    push(job, part)
    most = 65504.0 if wire == FP16 else 70000.0
    np.testing.assert_allclose(stored(job, IDS), -most, rtol=1e-2)


def committed(folder: Path, wire: str, step: int) -> tuple[InProcessJob, WorkerJournal]:
    """A job whose worker has pushed the gradients of a step, and its journal, read back."""
    identity = WorkerIdentity(0, 1, 2, job="j", start=0, started_at=1)
    first = WorkerJournal(folder / wire / str(step), identity)
    job = job_with(wire, journal=first)
    update = Update(0, step, OPTIONS, {0: gradients(job)}, {})
    request = job.client.build_push(update, job.live)
    request.origin = StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b""))
    job.client.push(request, phase=0)
    first.close(is_needed=True)
    return job, WorkerJournal(folder / wire / str(step), identity)


def logged(journal: WorkerJournal) -> list[bytes]:
    """The arrays of the last logged push to server 0."""
    assert journal.last is not None
    [(_, arrays)] = journal.last.requests[0]
    journal.close(is_needed=False)
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("wire", NARROW)
def test_the_log_has_a_push_as_it_was_sent(wire: str, tmp_path: Path) -> None:
    """So its repetition has the same bytes, and the servers add the same gradients."""
    job, journal = committed(tmp_path, wire, 3)
    assert journal.last is not None
    before = stored(job, IDS)
    later = InProcessJob(2, "async", tables=job.plan.tables)
    assert Client(0, 1, 2, later.connect, journal).repeat(journal.last)
    np.testing.assert_array_equal(stored(later, IDS), before)
    _, arrays = journal.last.requests[0][0]
    assert sum(array.nbytes for array in arrays[1:]) < arrays[0].nbytes
    journal.close(is_needed=False)


@pytest.mark.parametrize("wire", [FP16, INT8])
def test_rounding_depends_on_the_step_only(wire: str, tmp_path: Path) -> None:
    """A worker that computes a push again sends the same bytes."""
    one, again, other = (
        logged(committed(tmp_path / folder, wire, step)[1])
        for folder, step in (("a", 3), ("b", 3), ("c", 4))
    )
    assert one == again
    assert one != other


@pytest.mark.parametrize(("wire", "sent"), list(itertools.permutations((FP32, *NARROW), 2)))
def test_rows_in_another_form_are_refused(wire: str, sent: str) -> None:
    server = opened(narrow_plan(wire))
    worker = Worker(server, 0, workers=1)
    arrays, right = (
        FORMS[form].encode(rows_of([2.0]), None, (None, None)) for form in (sent, wire)
    )
    message = worker.push_request(0, {0: None}, None)
    refusal = r"rows of table 'users' are \w+\[1, 2\], expected |came with 3 arrays, expected 2"
    with pytest.raises((PlanError, ProtocolError), match=refusal):
        worker.say(message, ids_of([1]), *arrays, lane="push")
    # nothing of it is applied
    assert server.metrics().rows["users"] == 0
    worker.say(worker.push_request(0, {0: None}, None), ids_of([1]), *right, lane="push")
    assert server.metrics().rows["users"] == 1


def test_plans_with_different_forms_are_refused() -> None:
    """Both sides name the table and the forms."""
    job = job_with(BF16)
    with pytest.raises(PlanError, match=r"plan\.tables\[users\]\.wire: 'bf16' here, 'int8' there"):
        job.client.join(narrow_plan(INT8, server_num=2))
