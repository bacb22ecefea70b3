# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real Ray cluster whose actors and nodes are killed."""

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.records import lost_and_doubled
from tests.launch.workplace import wait_until
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight.cli import fleetrun

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
#: calls of an actor whose process leaves a file
CALLS = """
import os, ray
from fleetlight.ray import _MemberActor
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
member = ["fleetlight.cli.fleetlight", "member", "--"]

def run(actor, code):
    script = ["-c", f"open('ran', 'a').write('x'); {code}"]
    return actor.run.remote(member, script, {}, os.getcwd())
"""


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


def test_a_job_reaches_values_of_fleetrun(tmp_path: Path, expected: set[tuple[str, str]]) -> None:
    code, text = run_on_ray(tmp_path, "none")
    assert code == 0, text
    assert learned(text) == expected
    # servers on different nodes
    assert len(set(re.findall(r"server \d of 2 listens at (127\.0\.0\.\d):", text))) == 2, text


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


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of the job server of a cluster."""
    command = [sys.executable, str(HERE / "ray_cluster.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = next((line for line in process.stdout if line.startswith("READY ")), "")
        yield f"http://{found.split()[1]}"
        assert process.stdin is not None
        process.stdin.close()


class Tool:
    """The commands of a user in a folder."""

    def __init__(self, address: str, folder: Path) -> None:
        root = str(HERE.parent.parent)
        self._env = {"RAY_API_SERVER_ADDRESS": address, "PYTHONPATH": f"{root}/src"}
        self._folder = folder

    def __call__(self, name: str, *words: str) -> str:
        """Run fleetrun or fleetlight; returns its output."""
        command = [sys.executable, "-m", f"fleetlight.cli.{name}", *words]
        [code], text = finish([start(command, self._env, cwd=self._folder)])
        assert code == 0, text
        return text

    def submit(self, *words: str) -> str:
        """Submit a job; returns what names it."""
        python = ["--option", f"python={sys.executable}"]
        found = re.search(r"submitted (ray:\S+);", self("fleetrun", "--on", "ray", *python, *words))
        assert found is not None
        return found[1]

    def wait_for_driver(self, job: str, state: str) -> str:
        """Wait until the driver has a state; returns the rows of `fleetlight ps`."""
        rows: list[str] = []

        def is_there() -> bool:
            rows.append(self("fleetlight", "ps", job))
            return re.search(rf"^driver +{state}", rows[-1], re.MULTILINE) is not None

        wait_until(is_there, f"the driver in state {state}")
        return rows[-1]


def test_fleetrun_submits_stops_and_scales_a_job(cluster: str, tmp_path: Path) -> None:
    tool = Tool(cluster, tmp_path)
    counts = ["--server_num", "1", "--worker_num", "2", "--checkpoint", str(tmp_path / "ckpt")]
    script = [str(HERE / "patient.py"), str(tmp_path)]
    shown = json.loads(tool("fleetrun", "--on", "ray", *counts, "--print", *script))
    assert shown["entrypoint"].startswith("python -m fleetlight.ray ")
    job = tool.submit(*counts, *script)
    wait_until((tmp_path / "worker.1").exists, "a step of worker 1")
    rows = tool.wait_for_driver(job, "RUNNING")
    assert re.search(r"^server 0 +ALIVE", rows, re.MULTILINE)
    assert re.search(r"^worker 1 +ALIVE", rows, re.MULTILINE)
    again = tool("fleetlight", "scale", job, "--worker_num", "3").split()[-1]
    wait_until((tmp_path / "worker.2").exists, "a step of worker 2")
    assert "server 0 of 1 listens" in tool("fleetlight", "logs", again, "server", "0")
    (tmp_path / "enough").touch()
    tool.wait_for_driver(again, "SUCCEEDED")
    # each record once in each epoch, with 2 workers and with 3
    assert lost_and_doubled(tmp_path) == (0, 0)


def test_jobs_that_wait_for_room(cluster: str, tmp_path: Path) -> None:
    """One is stopped while it waits, and one gives up; each has the name of its script."""
    tool, script = Tool(cluster, tmp_path), str(HERE / "patient.py")
    counts = ["--server_num", "1", "--worker_num", "2", "--worker_cpus", "50"]
    stopped = tool.submit(*counts, script, str(tmp_path))
    given_up = tool.submit(*counts, "--deadline_s", "3", script, str(tmp_path))
    assert stopped != given_up
    tool.wait_for_driver(stopped, "RUNNING")
    tool("fleetlight", "stop", stopped)
    tool.wait_for_driver(stopped, "STOPPED")
    tool.wait_for_driver(given_up, "FAILED")
    assert "Ray has no room for 2 workers with {'CPU': 50.0} each" in tool(
        "fleetlight", "logs", given_up
    )
    assert not list(tmp_path.glob("worker.*"))


def called(folder: Path, calls: str) -> None:
    command = [sys.executable, "-c", f"{CALLS}\n{textwrap.dedent(calls)}"]
    [code], text = finish([start(command, cwd=folder)])
    assert code == 0, text


def test_a_repeated_call_starts_no_second_process(tmp_path: Path) -> None:
    """Ray calls an actor again that was out of reach for a while."""
    calls = """
    actor = _MemberActor.remote("worker 0")
    assert ray.get([run(actor, "raise SystemExit(3)") for _ in range(2)]) == [3, 3]
    """
    called(tmp_path, calls)
    assert (tmp_path / "ran").read_text() == "x"


def test_a_stop_reaches_a_process_that_has_not_started(tmp_path: Path) -> None:
    calls = """
    actor = _MemberActor.remote("worker 0")
    ray.get(actor.stop.remote())
    assert ray.get(run(actor, "import time; time.sleep(60)"), timeout=50) == 143
    """
    called(tmp_path, calls)


def test_errors_name_what_to_do(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    nowhere = "address=http://127.0.0.1:9"
    assert fleetrun.main(["--on", "ray", "--option", nowhere, "--nproc_per_node", "1", str(script)])
    assert "Ray's job server does not answer at http://127.0.0.1:9" in capfd.readouterr().err
    assert fleetrun.main(["--on", "ray", "--option", "adress=x", "--print", str(script)]) == 2
    assert "did you mean 'address'?" in capfd.readouterr().err
