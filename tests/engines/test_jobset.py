# SPDX-License-Identifier: Apache-2.0
"""Jobs of an emitted JobSet, which `jobset.py` runs with real processes."""

import re
import shutil
from pathlib import Path

import pytest
from tests.engines import container, manifests
from tests.engines.jobset import Cluster, RunningJobSet, cluster
from tests.engines.running import TOKEN
from tests.multiprocess.test_dialects import BIN, finish, start
from tests.multiprocess.test_stopping import ALL, seen
from tests.rig.needed import NEEDED

from fleetlight import checkpoint

_OBSTACLE = container.obstacle()
pytestmark = [
    *NEEDED,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_OBSTACLE is not None, reason=f"{_OBSTACLE}"),
]

SCRIPTS = Path(__file__).parents[1] / "multiprocess"
#: enough steps that no kill comes after the last one
LONG = ("--epochs", "10")
TWO = ("--server_num", "2", "--worker_num", "2")
JOURNALS = ("--option", "journal_size=1Gi", "--max_restarts", "3")
SAVES = ("--checkpoint", "ckpt", "--option", "checkpoint_claim=shared")
#: worker 1 has a setting that does not exist
WRONG = """
import torch
import fleetlight as fleet

fleet.init(strategy=fleet.DistributedStrategy(durability="log"))
if fleet.is_worker() and fleet.worker_index() == 1:
    fleet.DistributedStrategy(no_such_setting=1)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    fleet.barrier_worker()
"""


def manifest(*words: str) -> str:
    """A job whose script and compiled kernels are on one claim."""
    return manifests.manifest("--env", "XDG_CACHE_HOME=/job/cache", *words)


def with_scripts(where: Cluster, *names: str) -> Path:
    work = where.claim("work")
    for name in names:
        shutil.copy(SCRIPTS / name, work)
    return work


def learned(text: str) -> tuple[set[str], set[str]]:
    found = re.findall(r"LEARNT (\w+) \S+ OWN (\w+)", text)
    assert len(found) == 2, text
    return {shared for shared, _ in found}, {own for _, own in found}


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """What the same job learns under fleetrun."""
    command = [str(BIN / "fleetrun"), *TWO, "--tee", str(SCRIPTS / "outlive.py"), *LONG]
    codes, text = finish([start(command, cwd=tmp_path_factory.mktemp("fleetrun"))])
    assert codes == [0], text
    return learned(text)


def test_pods_that_are_killed_return_and_change_no_bit(
    bits: tuple[set[str], set[str]], tmp_path: Path
) -> None:
    with cluster(9, tmp_path) as where:
        with_scripts(where, "outlive.py", "mortal.py")
        job = RunningJobSet(manifest(*TWO, *JOURNALS, "outlive.py", *LONG), where, {"token": TOKEN})
        killed = []
        # server 0 is where the others meet
        for step, name in ((0, "server 1"), (9, "server 0"), (18, "worker 1")):
            job.run_until(lambda: f"loss after step {step}:" in job.logs("worker 0"))  # noqa: B023
            killed.append(job.pod(name).host.address)
            job.pod(name).kill()
            job.run_until(lambda: job.has(name) and job.pod(name).host.address != killed[-1])  # noqa: B023
            assert job.pod(name).host.address not in killed
        assert job.run_to_end() == "Completed", job.logs()
        assert learned(job.logs()) == bits
        assert (job.restarts, job.failures) == (0, [])
        assert "restarted: resuming in epoch" in job.logs("worker 1")


def test_a_permanent_error_ends_the_job_at_once(tmp_path: Path) -> None:
    with cluster(4, tmp_path) as where:
        (with_scripts(where) / "wrong.py").write_text(WRONG)
        job = RunningJobSet(manifest(*TWO, *JOURNALS, "wrong.py"), where, {"token": TOKEN})
        assert job.run_to_end() == "Failed", job.logs()
        assert job.restarts == 0
        [failure] = job.failures
        assert "worker: PodFailurePolicy: Container fleetlight" in failure
        assert "exit code 78" in failure
        assert "no_such_setting" in job.logs("worker 1")


def test_a_stopped_job_saves_and_resumes_on_other_counts(tmp_path: Path) -> None:
    with cluster(8, tmp_path) as where:
        work = with_scripts(where, "interrupted.py")
        shared = where.claim("shared")
        first = manifest(
            *(*TWO, *SAVES, "interrupted.py"),
            *("--mode", "sync", "--batch", "3", "--await_stop", "10"),
        )
        job = RunningJobSet(first, where, {"token": TOKEN})
        job.run_until(lambda: "waiting to be stopped" in job.logs("worker 0"))
        codes = job.delete()
        assert {codes["worker 0"], codes["worker 1"]} == {75}, job.logs()
        # a server that was asked to stop has nothing to save itself
        assert {codes["server 0"], codes["server 1"]} <= {0, 75}, job.logs()
        checkpoint.read(shared / "ckpt").verify()
        again = manifest(
            *("--server_num", "1", "--worker_num", "3", *SAVES, "--resume", "interrupted.py"),
            *("--mode", "sync", "--batch", "2"),
        )
        resumed = RunningJobSet(again, where, {"token": TOKEN}, uid="uid-2")
        assert resumed.run_to_end() == "Completed", resumed.logs()
        assert "resuming from /checkpoint/ckpt, saved at step 1" in resumed.logs()
        # each record once, in all starts
        assert seen(work, 0) == ALL


def test_an_evicted_pod_of_a_job_that_saves_restarts_it(tmp_path: Path) -> None:
    """The job saves for the pod, and JobSet restarts it although no restart is left."""
    with cluster(4, tmp_path) as where:
        work = with_scripts(where, "interrupted.py")
        where.claim("shared")
        words = ("--nproc_per_node", "2", *SAVES, "interrupted.py", "--await_stop", "10")
        job = RunningJobSet(manifest(*words), where, {"token": TOKEN})
        job.run_until(lambda: "waiting to be stopped" in job.logs("worker 0"))
        job.evict("worker 1")
        assert job.run_to_end() == "Completed", job.logs()
        assert job.restarts == 1
        assert "exit code 75" in job.failures[0] or "DisruptionTarget" in job.failures[0]
        assert sorted({*seen(work, 0), *seen(work, 1)}) == ALL
        assert len(seen(work, 0)) + len(seen(work, 1)) == len(ALL)


def test_connections_are_encrypted_by_the_names_of_pods(
    bits: tuple[set[str], set[str]], tmp_path: Path
) -> None:
    from fleetlight.security.certificates import make

    folder = tmp_path / "certs"
    make(str(folder), ["*.t.default.svc.cluster.local"], 30)
    with cluster(5, tmp_path) as where:
        with_scripts(where, "outlive.py", "mortal.py")
        words = (*TWO, *JOURNALS, "--ssl", str(folder), "outlive.py", *LONG)
        secret = {"token": TOKEN, **{file.name: file.read_text() for file in folder.iterdir()}}
        job = RunningJobSet(manifest(*words), where, secret)
        job.run_until(lambda: "loss after step 9:" in job.logs("worker 0"))
        job.pod("server 1").kill()
        assert job.run_to_end() == "Completed", job.logs()
        assert learned(job.logs()) == bits
