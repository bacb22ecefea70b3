# SPDX-License-Identifier: Apache-2.0
"""The report of an examination as text."""

from fleetlight.launch.doctor.findings import Finding
from fleetlight.launch.doctor.messages import Exam, ExamOptions, Facts, Link
from fleetlight.launch.doctor.table import exam_table, finding_lines, machine_table

HOSTS = ("10.0.0.1", "10.0.0.2")
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
