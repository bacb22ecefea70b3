# SPDX-License-Identifier: Apache-2.0
"""Findings from facts: each problem and advice has a remedy; sound machines have none."""

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.launch.doctor.doctors import free_ports

from fleetlight.launch.doctor.facts import PortListeners, facts_of, mtu_of, shared_memory
from fleetlight.launch.doctor.findings import (
    Finding,
    bits,
    exam_findings,
    machine_findings,
    seconds,
    seconds_a_step,
)
from fleetlight.launch.doctor.messages import Exam, ExamOptions, Facts, Link
from fleetlight.launch.doctor.table import exam_table, finding_lines, machine_table
from fleetlight.launch.inventory import Machine

HOSTS = ("10.0.0.1", "10.0.0.2")
ASKED = ExamOptions(names=HOSTS, hosts=HOSTS, port=6170, workers=2)
#: the facts of a sound machine
SOUND = Facts(
    asked=ASKED,
    name="node",
    name_address="10.0.0.1",
    fleetlight="1",
    torch="2",
    python="3",
    cores=8,
    memory=1 << 34,
    shared_memory=1 << 33,
    files=65536,
    interface="eth0",
    mtu=1500,
    listening=(6171, 6172, 6173, 40000),
)
FAST = 1.25e9


def exam(**changes: Any) -> Exam:
    links = tuple(
        Link(sender=i, receiver=1 - i, round_trip_s=1e-4, bytes_per_s=FAST) for i in range(2)
    )
    sound = Exam(asked=ASKED, facts={0: SOUND, 1: SOUND}, links=links, clocks={1: 0.01})
    return msgspec.structs.replace(sound, **changes)


def second(**changes: Any) -> dict[int, Facts]:
    return {0: SOUND, 1: msgspec.structs.replace(SOUND, **changes)}


def link(**changes: Any) -> tuple[Link, ...]:
    return (
        Link(**{"sender": 0, "receiver": 1, "round_trip_s": 1e-4, "bytes_per_s": FAST} | changes),
    )


def test_sound_machines_have_no_findings() -> None:
    assert exam_findings(exam()) == []
    assert list(machine_findings(SOUND)) == []


PROBLEMS: dict[str, tuple[Exam, str, str]] = {
    "did not start": (
        exam(absent={1: "connection refused"}),
        "10.0.0.2 is absent: connection refused",
        "start `fleetlight doctor --ips 10.0.0.1,10.0.0.2 --port 6170` there",
    ),
    "firewall": (exam(absent={1: "no reply"}), "no reply", "its firewall pass TCP port 6170"),
    "another list": (
        exam(absent={1: "was started with"}),
        "with",
        "the same list in the same order",
    ),
    "another program": (exam(absent={1: "did not reply within 1 s"}), "", "sport = 6170"),
    "gone": (
        exam(absent={0: "disconnected"}),
        "10.0.0.1 is absent",
        "read the output of its doctor",
    ),
    "lost": (exam(absent={0: "lost it"}), "10.0.0.1 is absent", "read the output of its doctor"),
    "uninformed": (
        exam(uninformed={1: "no reply"}),
        "10.0.0.2 did not receive the results: no reply",
        "set dev eth0 mtu 1400",
    ),
    "torch": (
        exam(facts=second(torch="2.1")),
        "torch differs between the machines: 2 on 10.0.0.1; 2.1 on 10.0.0.2",
        "install one torch on all",
    ),
    "fleetlight": (exam(facts=second(fleetlight="0")), "1 on 10.0.0.1; 0 on", "one fleetlight"),
    "no torch": (
        exam(facts={0: msgspec.structs.replace(SOUND, torch="not installed")}),
        "torch is not installed on 10.0.0.1",
        "pip install torch",
    ),
    "taken": (
        exam(facts=second(taken={6171: "port 6171 on h is taken by process 7; end that process"})),
        "port 6171 on h is taken by process 7",
        "choose another --port here and --start_port for fleetrun",
    ),
    "unmeasured": (
        exam(links=link(error="port 6170: no answer", bytes_per_s=None)),
        "10.0.0.1 -> 10.0.0.2 could not be measured: port 6170: no answer",
        "in both directions",
    ),
    "large": (
        exam(links=link(bytes_per_s=0.0)),
        "small messages arrive, large ones do not",
        "`ip link set dev eth0 mtu 1400`",
    ),
    "closed": (
        exam(links=link(closed={6172: "no answer"})),
        "no connection to ports 6172 (no answer)",
        "let the firewall of 10.0.0.2 pass TCP ports 6170-6173",
    ),
    "chosen": (
        exam(links=link(closed={40000: "no answer"})),
        "ports 40000 (no answer)",
        "all above 1024",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem_is_named_with_its_remedy(case: str) -> None:
    found, what, remedy = PROBLEMS[case]
    problem, *others = exam_findings(found)
    assert problem.is_problem
    assert what in problem.what
    assert remedy in problem.remedy
    assert not any(other.is_problem for other in others)


ADVICE: dict[str, tuple[Exam, str, str]] = {
    "python": (
        exam(facts=second(python="3.9")),
        "python differs between the machines",
        "one python",
    ),
    "mtu": (exam(facts=second(mtu=9000)), "MTU differs", "large packets may be lost"),
    "options": (
        exam(facts=second(asked=ExamOptions(names=HOSTS, hosts=HOSTS, port=6170, workers=3))),
        "different options: --nproc 2, --port 6170 on 10.0.0.1; --nproc 3",
        "the same options",
    ),
    "name": (
        exam(facts=second(name_address="127.0.1.1")),
        "node for 127.0.1.1 on 10.0.0.2",
        "/etc/hosts",
    ),
    "ahead": (exam(clocks={1: 2.04}), "10.0.0.2 is 2.0 s ahead of that of 10.0.0.1", "NTP"),
    "behind": (exam(clocks={1: -61.0}), "61.0 s behind", "NTP"),
    "late": (exam(links=link(round_trip_s=0.04)), "and back takes 40 ms", "fuse_grad_size_in_MB"),
    "shared": (exam(facts=second(shared_memory=64 << 20)), "has 64 MiB of shared", "--shm-size"),
    "unshared": (exam(facts=second(shared_memory=None)), "has no shared memory", "--shm-size"),
    "files": (exam(facts=second(files=256)), "may open only 256 files", "ulimit -n"),
    "cores": (exam(facts=second(cores=1)), "2 workers would share the 1 cores", "at most as many"),
    "threads": (exam(facts=second(threads="8")), "OMP_NUM_THREADS=8", "unset it"),
    "slow": (
        exam(links=(*link(), *link(sender=1, receiver=0, bytes_per_s=25e6))),
        "200 Mbit/s from 10.0.0.2 to 10.0.0.1: 100 MB of gradients take 4 s a step",
        "compression='int8' reduces it to about 1 s, localsgd with k_steps=4 1 s on average",
    ),
    "modest": (exam(links=link(bytes_per_s=400e6)), "take 0.25 s", "compression='bf16'"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_is_not_a_problem(case: str) -> None:
    found, what, remedy = ADVICE[case]
    (advice,) = exam_findings(found)
    assert not advice.is_problem
    assert what in advice.what
    assert remedy in advice.remedy


def test_problems_come_first() -> None:
    both = exam(clocks={1: 9.0}, links=link(error="no answer"))
    assert [finding.is_problem for finding in exam_findings(both)] == [True, False]


def test_machine_without_the_first_doctor_has_findings() -> None:
    found = exam(facts={1: SOUND}, absent={0: "connection refused"}, links=(), clocks={})
    assert [f.what for f in exam_findings(found)] == ["10.0.0.1 is absent: connection refused"]


def test_workers_with_gpus_may_share_cores() -> None:
    assert list(machine_findings(msgspec.structs.replace(SOUND, cores=1, gpus=2))) == []


@pytest.mark.parametrize(("hosts", "expected"), [(2, 4.0), (3, 16 / 3), (4, 6.0)])
def test_step_time_follows_from_bytes_sent(hosts: int, expected: float) -> None:
    assert seconds_a_step(25e6, hosts) == pytest.approx(expected)


def test_numbers_are_formatted() -> None:
    assert [bits(rate) for rate in (25e6, 117.5e6, 1.25e9)] == [
        *("200 Mbit/s", "940 Mbit/s"),
        "10 Gbit/s",
    ]
    assert [seconds(value) for value in (41.3, 4.13, 0.51, 0.012)] == [
        "41 s",
        "4.1 s",
        "0.51 s",
        "12 ms",
    ]
    assert Finding(True, "a", "b") == Finding(True, "a", "b")


# -- the facts of this machine


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


# -- the report of an examination as text


FACTS = Facts(
    name="a",
    fleetlight="0.1",
    torch="2",
    python="3",
    cores=8,
    memory=3 << 30,
    shared_memory=None,
    interface="eth0",
    mtu=1500,
)


def test_report_of_machines_and_links() -> None:
    exam = Exam(
        asked=ExamOptions(names=HOSTS, hosts=HOSTS),
        facts={0: FACTS, 1: Facts(name="long", mtu=None)},
        links=(
            Link(sender=0, receiver=1, round_trip_s=2e-4, bytes_per_s=25e6),
            Link(sender=1, receiver=0, round_trip_s=2e-4, bytes_per_s=25e6, closed={1: "no"}),
            Link(sender=1, receiver=0, error="no answer"),
        ),
        clocks={1: -0.0001},
    )
    assert exam_table(exam).splitlines() == [
        "machine   name  fleetlight  torch  python  cores  memory  GPUs  interface  MTU   clock",
        "10.0.0.1  a     0.1         2      3       8      3 GiB   0     eth0       1500",
        "10.0.0.2  long                             1      0 GiB   0     ?          ?     +0.000 s",
        "",
        "from      to        round trip  bandwidth   ports",
        "10.0.0.1  10.0.0.2  0.2 ms      200 Mbit/s  open",
        "10.0.0.2  10.0.0.1  0.2 ms      200 Mbit/s  closed",
        "10.0.0.2  10.0.0.1  -           -           -",
    ]


def test_report_of_a_single_machine() -> None:
    lines = machine_table(FACTS, (("eth0", "10.0.0.1"), ("", "::1")), [1500, None]).splitlines()
    assert lines[0] == "name             a (resolves to no address)"
    assert "shared memory    none (/dev/shm)" in lines
    assert "open files       no limit" in lines
    assert lines[-2:] == [
        "address          10.0.0.1 (eth0, MTU 1500)",
        "address          ::1 (interface unknown)",
    ]


def test_report_of_findings() -> None:
    found = [Finding(True, "it is so", "do this"), Finding(False, "and so", "or that")]
    assert finding_lines(found) == ("problem: it is so\n    do this\nadvice: and so\n    or that")


def test_report_fits_a_narrow_terminal() -> None:
    exam = Exam(
        asked=ExamOptions(names=HOSTS, hosts=HOSTS),
        facts={0: FACTS},
        links=(Link(sender=0, receiver=1, round_trip_s=2e-4, bytes_per_s=25e6),),
    )
    lines = exam_table(exam, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[:2] == ["10.0.0.1", "  name: a"]
    assert lines[-1] == "  ports: open"
    found = [Finding(True, "a sentence that is longer than the terminal is", "do this")]
    assert finding_lines(found, 40, colour=True).splitlines() == [
        "\x1b[31mproblem\x1b[0m: a sentence that is longer than",
        "  the terminal is",
        "    do this",
    ]
