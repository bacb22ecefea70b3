# SPDX-License-Identifier: Apache-2.0
"""The node of this machine: its ports and the facts that launchers compare."""

import contextlib
import pathlib
import socket

import pytest

from fleetlight.errors import LaunchError
from fleetlight.launch.inventory import version_of
from fleetlight.launch.job.spec import JobSpec, MachineSpec, RendezvousSpec, RoleSpec
from fleetlight.launch.machines.own_node import reserve_node, script_hash, with_shared_facts
from fleetlight.roles.role import Kind


def job(script: str = "t.py", **more: object) -> JobSpec:
    return JobSpec(
        script=script,
        worker=RoleSpec(kind=Kind.WORKER, count=2),
        server=RoleSpec(kind=Kind.SERVER, count=1),
        **more,  # type: ignore[arg-type]
    )


def test_each_process_and_the_master_have_their_own_port() -> None:
    with contextlib.ExitStack() as held:
        node, reservations = reserve_node(job(), held, restart=2, failures=1)
        ports = [port for _, port in (*node.workers, *node.servers)] + [node.master_port]
        assert sorted(ports) == sorted(reservation.port for reservation in reservations)
        assert len(set(ports)) == 4
        assert (node.restart, node.failures) == (2, 1)


def test_listed_endpoints_are_reserved() -> None:
    with contextlib.ExitStack() as held:
        _, [reservation, *_] = reserve_node(job(), held)
        port = reservation.port
    listed = MachineSpec(workers=(("127.0.0.1", port),))
    with contextlib.ExitStack() as held:
        node, reservations = reserve_node(JobSpec(script="t.py", machine=listed), held)
        assert node.workers == (("127.0.0.1", port),)
        assert port in [held_port.port for held_port in reservations]


@pytest.mark.parametrize("flag", ["--servers", "--workers"])
def test_error_for_a_listed_port_in_use_names_the_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = job(machine=MachineSpec(**{flag.removeprefix("--"): (taken.getsockname(),)}))
        with (
            contextlib.ExitStack() as held,
            pytest.raises(LaunchError, match=f"is taken.* or choose another port in {flag}"),
        ):
            reserve_node(spec, held)


def test_script_is_identified_by_its_bytes(tmp_path: pathlib.Path) -> None:
    one, same, other = (tmp_path / name for name in ("1.py", "2.py", "3.py"))
    one.write_text("a")
    same.write_text("a")
    other.write_text("b")
    assert script_hash(job(str(one))) == script_hash(job(str(same))) != script_hash(job(str(other)))
    assert script_hash(job(str(tmp_path / "none"))) == "unreadable"
    assert script_hash(job("pkg.train", is_module=True)) == "pkg.train"


def test_facts_that_launchers_compare() -> None:
    spec = RendezvousSpec(master=("h", 1), min_nodes=2, max_nodes=3, rank=1)
    with contextlib.ExitStack() as held:
        node = with_shared_facts(reserve_node(job(), held)[0], job(max_restarts=4), spec)
    agreed = dict(node.agreed)
    assert agreed["the number of machines"] == "2:3"
    assert agreed["--max_restarts"] == "4"
    assert agreed["the torch version"] == version_of("torch") != "not installed"
    assert node.rank == 1
