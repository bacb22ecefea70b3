# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real Ray cluster whose actors and nodes are killed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (fleetlight[ray])"
    ),
]

HERE = Path(__file__).parent
OUTLIVE = str(HERE.parent / "multiprocess" / "outlive.py")


def learned(text: str) -> set[tuple[str, str]]:
    """The trained values of both workers."""
    found = re.findall(r"LEARNT (\w+) \S+ OWN (\w+)", text)
    assert len(found) == 2, text
    return set(found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """The values that the same job reaches under fleetrun."""
    counts = ["--server_num", "2", "--worker_num", "2", "--tee"]
    command = [str(BIN / "fleetrun"), *counts, OUTLIVE]
    [code], text = finish([start(command, cwd=tmp_path_factory.mktemp("fleetrun"))])
    assert code == 0, text
    return learned(text)


def run_on_ray(folder: Path, harm: str, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(HERE / "ray_job.py"), str(folder), harm, OUTLIVE, *arguments]
    root = str(HERE.parent.parent)
    quiet = {"RAY_DEDUP_LOGS": "0", "PYTHONPATH": f"{root}/src:{root}"}
    [code], text = finish([start(command, quiet)])
    return code, text


def test_a_job_reaches_the_values_of_fleetrun(
    tmp_path: Path, expected: set[tuple[str, str]]
) -> None:
    code, text = run_on_ray(tmp_path, "none")
    assert code == 0, text
    assert learned(text) == expected
    # servers on different nodes
    hosts = re.findall(r"server \d of 2 listens at (127\.0\.0\.\d):", text)
    assert len(set(hosts)) == 2, text


@pytest.mark.parametrize("harm", ["actor", "node"])
def test_a_lost_part_of_the_cluster_changes_nothing(
    harm: str, tmp_path: Path, expected: set[tuple[str, str]]
) -> None:
    code, text = run_on_ray(tmp_path, harm, "--die", "1:3:forward")
    assert code == 0, text
    assert learned(text) == expected
    assert text.count(" of 2 listens at ") == 3, text


def test_a_script_that_fails_ends_the_job(tmp_path: Path) -> None:
    code, text = run_on_ray(tmp_path, "none", "--no_such_flag")
    assert code == 2, text
    assert "ended with code 2" in text
