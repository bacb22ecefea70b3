# SPDX-License-Identifier: Apache-2.0
"""The facts of this machine."""

import os
import socket
from pathlib import Path

from tests.launch.doctor.doctors import free_ports

from fleetlight.launch.doctor.facts import PortListeners, facts_of, mtu_of, shared_memory
from fleetlight.launch.doctor.messages import ExamOptions
from fleetlight.launch.inventory import Machine


def test_facts_of_this_machine() -> None:
    machine = Machine(cores=3, gpus=1, addresses=(("lo", "127.0.0.1"),))
    exam_options = ExamOptions(workers=2)
    facts = facts_of(machine, {"OMP_NUM_THREADS": "4"}, exam_options, "127.0.0.2")
    assert (facts.asked, facts.cores, facts.gpus, facts.threads) == (exam_options, 3, 1, "4")
    assert facts.name == socket.gethostname()
    assert facts.python.startswith("3.")
    assert facts.memory > 1 << 20
    assert facts.interface == "lo"
    assert facts.mtu == mtu_of("lo")
    assert facts_of(machine, {}, exam_options).interface is None


def test_unknown_mtu_is_zero() -> None:
    assert (mtu_of("lo") or 0) > 1000
    assert mtu_of("none0") is None
    assert mtu_of(None) is None
    assert mtu_of("a name that is too long for any") is None


def test_shared_memory(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert shared_memory(tmp_path) == found.f_frsize * found.f_blocks
    assert shared_memory(tmp_path / "none") is None


def test_doctor_listens_on_job_ports_and_one_more() -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 1)):
        held = PortListeners("127.0.0.1", range(first, first + 3))
    assert list(held.taken) == [first + 1]
    assert (
        f"port {first + 1} on 127.0.0.1 is taken by process {os.getpid()}" in held.taken[first + 1]
    )
    assert held.ports[:2] == (first, first + 2)
    assert len(held.ports) == 3
    for port in held.ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
    held.close()
    again = PortListeners("127.0.0.1", range(first, first + 3))
    assert again.taken == {}
    again.close()
