# SPDX-License-Identifier: Apache-2.0
"""Operations of a group, and the errors when a worker does not take part."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.workers import WorkerFailedError, run_workers

import fleetlight as fleet
from fleetlight.collective import group as groups
from fleetlight.collective.group import Group, is_network_error
from fleetlight.errors import CheckpointError, ConfigError, DeadlineError, PeerError
from fleetlight.fleet.job import current


def test_a_single_worker_gets_its_own_values() -> None:
    group = Group()
    assert group.alone
    assert group.all_reduce(torch.tensor([3.0])).tolist() == [3.0]
    assert group.gather_bytes(b"x", "test") == [b"x"]
    assert group.bytes_to_first(b"x", "test") == [b"x"]
    assert group.broadcast_bytes(b"x", "test") == b"x"
    group.barrier()
    group.assemble("anything")
    group.leave()


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="sum, max, min"):
        Group().all_reduce(torch.ones(1), "product")


@pytest.mark.parametrize(
    ("text", "of_the_network"),
    [
        ("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9887", True),
        ("[/x/gloo/gloo/transport/tcp/buffer.cc:78] Timed out waiting 3000ms for recv", True),
        ("[/x/gloo/gloo/transport/tcp/pair.cc:537] Read error: No route to host", True),
        # a peer sent a tensor of another size
        ("[enforce fail at /x/gloo/gloo/transport/tcp/pair.cc:460] op.nbytes. 4 vs 8", True),
        ("ProcessGroupGloo::allgather: invalid output tensor list at index 0", False),
        ("The size of tensor a (2) must match the size of tensor b (3)", False),
    ],
)
def test_network_errors_are_distinguished_from_wrong_arguments(
    text: str, of_the_network: bool
) -> None:
    assert is_network_error(RuntimeError(text)) is of_the_network


def exchange() -> Any:
    group = current().group
    groups._MESSAGE_BYTES = 1
    mine = torch.tensor([float(group.index), 5.0])
    return (
        [group.all_reduce(mine.clone(), op).tolist() for op in ("sum", "max", "min")],
        group.gather_bytes(b"w" * group.index, "test"),
        group.broadcast_bytes(f"from {group.index}".encode(), "test"),
        [float(fleet.all_reduce(group.index + 0.5)), fleet.all_reduce(group.index, "max")],
        [t.tolist() for t in fleet.all_gather(mine)],
        group.bytes_to_first(b"w" * group.index, "test"),
    )


@pytest.mark.multiprocess
def test_three_workers_exchange() -> None:
    results = run_workers(exchange, 3)
    for result in results:
        assert result[0] == [[3.0, 15.0], [2.0, 5.0], [0.0, 5.0]]
        assert result[1] == [b"", b"w", b"ww"]
        assert result[2] == b"from 0"
        assert result[3] == [4.5, 2]
        assert result[4] == [[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]]
    assert [result[5] for result in results] == [[b"", b"w", b"ww"], [], []]


def worker_1_fails() -> str:
    group = current().group

    def action() -> None:
        if group.index == 1:
            raise CheckpointError("the disk is full")

    try:
        group.together(action, "test")
    except CheckpointError as error:
        return f"{'PeerError: ' if isinstance(error, PeerError) else ''}{error}"
    return "no error"


@pytest.mark.multiprocess
def test_a_failure_of_one_worker_is_raised_on_all() -> None:
    zero, one = run_workers(worker_1_fails)
    assert zero == "PeerError: on worker 1: the disk is full"
    assert one == "the disk is full"


def worker_1_raises_key_error() -> str:
    group = current().group

    def action() -> None:
        raise KeyError("x")

    with pytest.raises((KeyError, CheckpointError)) as caught:
        group.together(action if group.index == 1 else None, "test")
    return str(caught.value)


@pytest.mark.multiprocess
def test_a_foreign_exception_keeps_its_type_name() -> None:
    assert run_workers(worker_1_raises_key_error)[0] == "on worker 1: KeyError: 'x'"


def works_longer_than_the_deadline() -> bool:
    group = current().group
    group.deadline_s = 0.2
    done = threading.Event()
    group.together((lambda: done.wait(1.5) and None) if group.index == 0 else None, "test")
    return True


@pytest.mark.multiprocess
def test_work_in_together_may_exceed_the_deadline() -> None:
    assert run_workers(works_longer_than_the_deadline) == [True, True]


def destroyed_by_the_script() -> int:
    total = fleet.all_reduce(1)
    torch.distributed.destroy_process_group()
    return int(total)


@pytest.mark.multiprocess
def test_a_script_may_destroy_the_process_group() -> None:
    # stop_worker runs after it and has nothing to close
    assert run_workers(destroyed_by_the_script) == [2, 2]


def worker_1_is_late() -> None:
    group = current().group
    if group.index == 0:
        try:
            group.barrier("test barrier")
        except DeadlineError as error:
            group.fail(str(error))
            raise
    # worker 1 sends heartbeats but never arrives; the first of worker 0 may be in flight
    while group.liveness is not None and not group.liveness.all_gone():
        pass


@pytest.mark.multiprocess
def test_a_timeout_does_not_blame_a_worker_at_the_same_step() -> None:
    with pytest.raises(WorkerFailedError, match=r"test barrier at step 0 timed out: this worker"):
        run_workers(worker_1_is_late, deadline_s=2.0)


def worker_1_stops() -> None:
    group = current().group
    if group.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"worker 1 .* has been silent for .* at step 0"):
        group.barrier("test barrier")
    os.kill(group.hellos[1].pid, signal.SIGKILL)
    group.fail("done")
    os._exit(0)


@pytest.mark.multiprocess
def test_a_stopped_worker_is_named_at_the_deadline() -> None:
    # neither returns a result: worker 0 kills worker 1 after checking the error
    with pytest.raises(WorkerFailedError) as caught:
        run_workers(worker_1_stops, deadline_s=2.0)
    assert "Error:" not in str(caught.value)
