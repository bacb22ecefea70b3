# SPDX-License-Identifier: Apache-2.0
"""A group: how it forms, what it does together, and the positions that it compares."""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.errors import error_text
from tests.workers import WorkerFailedError, reserved_port, run_processes, run_workers

import fleetlight as fleet
from fleetlight.collective import forming
from fleetlight.collective import group as groups
from fleetlight.collective.forming import form, given_device, located
from fleetlight.collective.group import Group, is_network_error
from fleetlight.collective.membership import liveness, rendezvous
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import (
    BLANK,
    PACKED_BYTES,
    UNKNOWN,
    GradientStamp,
    Position,
    check_equally_far,
)
from fleetlight.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    DivergedError,
    MembershipError,
    PeerError,
    RoleError,
    StrategyError,
)
from fleetlight.fleet.job import current
from fleetlight.roles import Role, from_environment, members
from fleetlight.roles.members import MemberHello
from fleetlight.security.certificates import make
from fleetlight.security.context import both_contexts


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
    assert "Error:" not in error_text(
        WorkerFailedError, run_workers, worker_1_stops, deadline_s=2.0
    )


# Forming a group: missing workers, duplicate indices, taken ports.


def hello(index: int, address: str) -> MemberHello:
    return MemberHello(kind="worker", index=index, address=address, hostname="h", pid=1)


def test_an_unknown_master_name_is_an_error() -> None:
    unknown = "x" * 64  # too long for a name, so no DNS server is asked
    with pytest.raises(MembershipError, match="worker 0, cannot be res"):
        rendezvous.join((unknown, 1), rendezvous.RendezvousDeadline(0.1), "worker 0")


def test_local_ranks_and_node_ranks_are_derived() -> None:
    hellos = {i: hello(i, a) for i, a in enumerate(["a", "a", "b", "b", "b"])}
    role = located(Role(index=3, worker_num=5), hellos)
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == (1, 3, 1, 2)
    # local_rank from the launcher wins
    assert located(Role(index=3, worker_num=5, local_rank=7), hellos).local_rank == 7


def test_a_missing_master_is_an_error() -> None:
    with pytest.raises(RoleError, match="nothing says where"):
        form(Role(index=0, worker_num=2), "0", 1.0)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        role = Role(index=0, worker_num=2, master=("127.0.0.1", port))
        with pytest.raises(MembershipError, match=rf"port {port} of 127\.0\.0\.1 cannot be opened"):
            form(role, "0", 1.0)


def test_a_missing_worker_0_is_named() -> None:
    holder, port = reserved_port()
    role = Role(index=1, worker_num=2, master=("127.0.0.1", port))
    with holder, pytest.raises(MembershipError, match=rf"worker 0 did not listen at .*:{port}"):
        form(role, "0", 0.3)


def known_at_connections() -> list[bool]:
    """For each later connection of this worker, whether the others knew it already."""
    plain, me, known = liveness.cloned, os.environ["FLEET_INDEX"], []

    def seen(store: Any) -> Any:
        known.append(store.check([f"hello/{me}"]))
        return plain(store)

    liveness.cloned = seen
    fleet.init(is_collective=True)
    fleet.stop_worker()
    return known


@pytest.mark.multiprocess
def test_workers_connect_before_they_are_known() -> None:
    """Worker 0 keeps the store: a worker that connects later would find no store."""
    assert run_processes(known_at_connections, [(), ()]) == [[False, False]] * 2


@pytest.mark.multiprocess
def test_missing_workers_are_named() -> None:
    holder, port = reserved_port()
    endpoints = (("127.0.0.1", port), ("127.0.0.1", 1), ("127.0.0.1", 2))
    role = Role(index=0, worker_num=3, master=("127.0.0.1", port), worker_endpoints=endpoints)
    text = r"1 of 3 workers joined within 0\.3 s; missing: worker 1 \(127\.0\.0\.1:1\), worker 2"
    with holder, pytest.raises(MembershipError, match=text):
        form(role, "0", 0.3)


def same_index() -> Any:
    os.environ["FLEET_INDEX"] = "0" if os.environ["FLEET_INDEX"] == "0" else "1"
    fleet.init(is_collective=True)


@pytest.mark.multiprocess
def test_a_duplicate_index_is_an_error() -> None:
    with pytest.raises(WorkerFailedError, match="two workers say they are worker 1"):
        run_processes(same_index, [(), (), ()], deadline_s=3.0)


def another_torch() -> Any:
    if os.environ["FLEET_INDEX"] == "1":
        forming.torch.__version__ = "1.0.0"  # type: ignore[attr-defined]
    fleet.init(is_collective=True)


@pytest.mark.multiprocess
def test_different_versions_of_torch_are_named() -> None:
    with pytest.raises(WorkerFailedError, match=r"runs torch 2\.13\S*, but worker 1 .* torch 1\.0"):
        run_processes(another_torch, [(), ()])


def open_own_process_group(backend: str) -> None:
    env = os.environ
    host, port = env["FLEET_MASTER"].split(":")
    index, size = int(env["FLEET_INDEX"]), int(env["FLEET_WORKER_NUM"])
    for name in [n for n in env if n.startswith("FLEET_") and n != "FLEET_HOST"]:
        del env[name]
    dist.init_process_group(
        backend, init_method=f"tcp://{host}:{port}", rank=index, world_size=size
    )


def adopt(backend: str) -> Any:
    open_own_process_group(backend)
    fleet.init(is_collective=True)
    facts = fleet.worker_index(), current().group.size, fleet.all_reduce(1)
    fleet.barrier_worker()
    indices = fleet.all_gather(fleet.worker_index())
    fleet.stop_worker()
    # the script opened it, so it stays open
    still = dist.is_initialized()
    dist.destroy_process_group()
    return *facts, indices, still


@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"], ids=["gloo", "no main memory"])
def test_a_process_group_of_the_script_is_used_and_left_open(backend: str) -> None:
    expected = [(i, 2, 2, [0, 1], True) for i in range(2)]
    assert run_processes(adopt, [(backend,), (backend,)]) == expected


def adopt_encrypted(folder: str, host: str) -> Any:
    open_own_process_group("gloo")
    forming.platform.node = lambda: host  # type: ignore[attr-defined]
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(ssl=folder))
    total = fleet.all_reduce(1)
    fleet.stop_worker()
    return total


@pytest.mark.multiprocess
def test_a_process_group_of_the_script_is_not_encrypted(tmp_path: Path) -> None:
    make(tmp_path)
    folder = str(tmp_path)
    # one host needs no encryption
    assert run_processes(adopt_encrypted, [(folder, "a"), (folder, "a")]) == [2, 2]
    text = r"opened torch's process group itself, .* between 2 hosts is not encrypted; leave init_p"
    with pytest.raises(WorkerFailedError, match=text):
        run_processes(adopt_encrypted, [(folder, "a"), (folder, "b")])


def torchrun_role(index: int, master: str, local_size: int) -> Role:
    """The role that torchrun's variables give if its agent keeps the store."""
    host, port = master.split(":")
    variables = {
        "RANK": str(index),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return from_environment(variables)


@pytest.mark.parametrize(
    ("master", "local_size"),
    [("127.0.0.1:1", 1), ("192.0.2.1:1", 2)],
    ids=["workers elsewhere", "store elsewhere"],
)
def test_the_store_of_torchrun_is_refused_across_hosts(
    master: str, local_size: int, tmp_path: Path
) -> None:
    make(tmp_path)
    text = (
        rf"torchrun keeps the rendezvous store .* at {master} .* no TLS, .* fleetrun --ssl in place"
    )
    with pytest.raises(StrategyError, match=text):
        form(torchrun_role(0, master, local_size), "0", 1.0, tls=both_contexts(tmp_path))


def adopted_by_torchrun(folder: str, host: str) -> Any:
    """A worker of two, under an agent whose store this test keeps."""
    env = os.environ
    index, master = int(env["FLEET_INDEX"]), env["FLEET_MASTER"]
    for name in [n for n in env if n.startswith("FLEET_")]:
        del env[name]
    role = torchrun_role(index, master, 2)
    assert role.master is not None
    store = dist.TCPStore(*role.master, is_master=True, wait_for_workers=False) if not index else 0
    forming.platform.node = lambda: host  # type: ignore[attr-defined]
    role, group = form(role, "0", 10.0, tls=both_contexts(folder))
    interface, total = env["GLOO_SOCKET_IFNAME"], float(group.all_reduce(torch.ones(1)))
    group.barrier("the end")
    group.leave()
    del store
    return role.address, interface, total


@pytest.mark.multiprocess
def test_torchrun_on_one_host_uses_the_loopback(tmp_path: Path) -> None:
    make(tmp_path)
    each = [(str(tmp_path), "a")] * 2
    assert run_processes(adopted_by_torchrun, each) == [("127.0.0.1", "lo", 2)] * 2
    with pytest.raises(WorkerFailedError, match="torchrun keeps the rendezvous store"):
        run_processes(adopted_by_torchrun, [(str(tmp_path), "a"), (str(tmp_path), "b")])


def addresses(host_variable: str) -> Any:
    if host_variable:
        os.environ["FLEET_HOST"] = host_variable
    open_own_process_group("gloo")
    forming.route_to = lambda host: f"route to {host}"
    fleet.init(is_collective=True)
    found = sorted(hello.address for hello in current().group.hellos.values())
    fleet.stop_worker()
    return found


@pytest.mark.multiprocess
def test_an_adopted_worker_reports_its_own_address() -> None:
    expected = ["127.0.0.9", "route to 127.0.0.1"]
    assert run_processes(addresses, [("",), ("127.0.0.9",)]) == [expected, expected]


def test_a_given_gpu_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for present, device, expected in ((True, 1, "cuda:1"), (True, None, "cpu"), (False, 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        assert given_device(Role(device=device)) == torch.device(expected)
    assert chosen == [1]


def with_nccl(kind: str) -> str:
    """Join a job on a host with one GPU, of which each worker thinks that it is alone."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    return error_text(MembershipError, fleet.init, is_collective=True)


@pytest.mark.multiprocess
def test_workers_that_share_a_gpu_unknowingly_are_refused() -> None:
    for error in run_processes(with_nccl, [("",), ("",)]):
        assert error.startswith("2 workers share the 1 GPU(s) of this host")
        assert "LOCAL_WORLD_SIZE" in error


def test_an_error_waits_until_all_workers_have_read_the_hellos() -> None:
    store, raised, raises = dist.HashStore(), [], threading.Event()
    store.set("hello/0", members.encode(hello(0, "a")).decode())

    def refused() -> None:
        try:
            with rendezvous.kept_for_readers(store, 2):
                rendezvous.gather(store, 1, [], rendezvous.RendezvousDeadline(1))
                raises.set()
                raise MembershipError("another version")
        except MembershipError:
            raised.append(True)

    thread = threading.Thread(target=refused)
    thread.start()
    assert raises.wait(20)
    thread.join(timeout=0.2)
    assert not raised
    store.add("hellos gathered", 1)
    thread.join()
    assert raised


def test_an_error_before_the_hellos_are_there_is_raised_at_once() -> None:
    store = dist.HashStore()
    with pytest.raises(MembershipError), rendezvous.kept_for_readers(store, 2):
        raise MembershipError("a worker is missing")
    assert store.add("hellos gathered", 0) == 0


# Positions: differences are detected, and every route transmits them exactly.

FAR = Position(2**40 + 7, 2**62 + 1)


def test_a_stamp_survives_packing() -> None:
    for stamp in (GradientStamp(FAR, 2**32 - 1), GradientStamp(UNKNOWN, 7), BLANK):
        assert len(stamp.packed()) == PACKED_BYTES
        assert GradientStamp.unpacked(stamp.packed()) == stamp


def test_equal_or_unknown_positions_are_accepted() -> None:
    check_equally_far({})
    check_equally_far({0: FAR, 1: FAR})
    check_equally_far({0: UNKNOWN, 1: FAR, 2: FAR})


def test_different_positions_are_named() -> None:
    positions = {0: Position(1, 8), 1: Position(0, 64), 2: Position(1, 8), 3: UNKNOWN}
    with pytest.raises(DivergedError) as caught:
        check_equally_far(positions)
    assert "worker 1 at 64 of epoch 0, workers 0, 2 at 8 of epoch 1. If one" in str(caught.value)
    with pytest.raises(DivergedError, match=r"workers 0, 1, 2, 3, 4, 5, 6, 7 \.\.\. at 8"):
        check_equally_far({**{i: Position(0, 8) for i in range(9)}, 9: FAR})


def through_process_groups(dtype: torch.dtype) -> list[bool]:
    group = current().group
    reducer = Reducer(group.size, group.communicators(2))
    diverged = []
    for mine in (FAR, Position(0, group.index)):
        reducer.stamp = GradientStamp(mine)
        buckets = [Bucket(i, torch.ones(3, dtype=dtype)) for i in range(3)]
        for future in [reducer.reduce(bucket) for bucket in buckets]:
            future.wait()
        assert all(bool((bucket.buffer == 1).all()) for bucket in buckets)
        try:
            check_equally_far({i: stamp.position for i, stamp in reducer.stamps().items()})
        except DivergedError:
            diverged.append(True)
        else:
            diverged.append(False)
    return diverged


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_gradient_type_carries_positions(dtype: torch.dtype) -> None:
    assert run_workers(through_process_groups, 2, dtype) == [[False, True]] * 2
