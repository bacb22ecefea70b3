# SPDX-License-Identifier: Apache-2.0
"""The launcher on several hosts: ranks, and training across hosts."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rig.hosts import Rig, hosts
from tests.rig.needed import NEEDED

from fleetlight.security.certificates import make

pytestmark = [*NEEDED, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("train.py"))
RESULT = re.compile(r"RESULT (\d+/\d+) (\d+/\d+) ([\d.]+) ([\d.]+)")


def run(rig: Rig, flags: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """Run a launcher on each host until all exit with code 0; returns their output."""
    running = []
    for host, own in zip(rig.hosts, flags, strict=True):
        argv = [sys.executable, "-m", "fleetlight.launch", *own, "--tee"]
        logs = ["--log_dir", f"log{host.number}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(host.start([*argv, *logs, SCRIPT], cwd=folder, **pipes))
    texts = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(texts)
    return texts


def printed_roles(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The roles that the workers printed, in the order of ranks."""
    return sorted(found for text in texts for found in RESULT.findall(text))


def test_two_hosts_of_unequal_size_with_a_master(tmp_path: Path) -> None:
    with hosts(2) as rig:
        first, second = rig.addresses
        meeting = ["--nnodes", "2", "--master", f"{first}:6170"]
        # the host with fewer workers comes first: ranks must not follow from its size
        flags = [[*meeting, "--nproc_per_node", count] for count in ("1", "2")]
        roles = printed_roles(run(rig, flags, tmp_path))
    assert [who[:3] for who in roles] == [
        ("0/3", "0/2", first),
        ("1/3", "0/2", second),
        ("2/3", "1/2", second),
    ]
    assert len({total for *_, total in roles}) == 1
    for number in (1, 2):
        original = tmp_path / "log1" / f"workerlog.{number}"
        origin, _, copy = (tmp_path / "log0" / original.name).read_text().partition("\n")
        assert origin == f"--- copied from {second}:{original} ---"
        assert copy == original.read_text()
    assert not (tmp_path / "log1" / "workerlog.0").exists()


def test_two_hosts_over_tls(tmp_path: Path) -> None:
    with hosts(2) as rig:
        make(tmp_path / "certs", rig.addresses)
        flags = [["--ips", ",".join(rig.addresses), "--nproc_per_node", "2", "--ssl", "certs"]] * 2
        texts = run(rig, flags, tmp_path)
    roles = printed_roles(texts)
    assert [who for who, *_ in roles] == ["0/4", "1/4", "2/4", "3/4"]
    assert len({total for *_, total in roles}) == 1
    assert any("TLS 1.3 between hosts" in text for text in texts)
    assert not any("can join" in text for text in texts)
