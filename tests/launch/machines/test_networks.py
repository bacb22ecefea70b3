# SPDX-License-Identifier: Apache-2.0
"""Two machines with a cable between them, made of network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cables import ADDRESSES, NEEDED, ip, two_machines
from tests.launch.workplace import Job, Workplace

pytestmark = NEEDED

WORK = """
    import os, pathlib, sys, time
    names = ("FLEET_HOST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
    node = os.environ["FLEET_NODE_RANK"]
    pathlib.Path("seen." + node).write_text(" ".join(os.environ[name] for name in names) + "\\n")
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces, each with one end of a cable."""
    with two_machines() as names:
        yield names


def start(place: Workplace, spaces: tuple[str, str], *flags: str, seconds: str) -> list[Job]:
    script = place.script(WORK)
    jobs = []
    for number, name in enumerate(spaces):
        place.prefix = ("ip", "netns", "exec", name)
        jobs.append(place.start(*flags, "--log_dir", f"log{number}", script, seconds))
    return jobs


def test_addresses_and_interfaces_are_found(place: Workplace, spaces: tuple[str, str]) -> None:
    flags = ["--nnodes", "2", "--master", f"{ADDRESSES[0]}:6170"]
    for number, job in enumerate(start(place, spaces, *flags, seconds="0")):
        code, output = job.end()
        assert code == 0, output
        own = ADDRESSES[number]
        assert f"own address: {own}" in output
        assert f"GLOO_SOCKET_IFNAME=cable{number}: the interface of {own}" in output
        seen = place.wait_for(f"seen.{number}")
        assert seen == f"{own} cable{number} cable{number} {ADDRESSES[0]}\n"


def test_a_cut_cable_ends_the_job_on_both_sides(place: Workplace, spaces: tuple[str, str]) -> None:
    jobs = start(place, spaces, "--ips", ",".join(ADDRESSES), seconds="600")
    for node in (0, 1):
        place.wait_for(f"seen.{node}")
    ip("-n", spaces[0], "link", "set", "cable0", "down")
    (code, first), (other_code, second) = (job.end() for job in jobs)
    assert (code, other_code) == (1, 1)
    assert f"failed: node 1 ({ADDRESSES[1]}) went away: no sign of life" in first.splitlines()[-1]
    assert f"failed: node 0, which serves {ADDRESSES[0]}:6170, went away" in second.splitlines()[-1]
