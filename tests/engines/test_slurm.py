# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real Slurm: by hand and by fleetrun, with lost tasks and nodes, stops and requeues."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.cluster import Cluster, cluster, obstacle, wait_until
from tests.engines.login import COUNTS, Login
from tests.engines.running import TOKEN
from tests.multiprocess.test_dialects import BIN, finish, results, start

_OBSTACLE = obstacle()
pytestmark = [
    pytest.mark.long,
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(_OBSTACLE is not None, reason=f"{_OBSTACLE}"),
]

HERE = Path(__file__).parent
TRAIN = str(HERE.parent / "multiprocess" / "train.py")
OUTLIVE = str(HERE.parent / "multiprocess" / "outlive.py")
GATED = str(HERE / "gated.py")
ELASTIC = str(HERE.parent / "multiprocess" / "elastic.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def login(slurm: Cluster, tmp_path: Path) -> Login:
    return Login(slurm, tmp_path)


def learned(text: str) -> set[str]:
    """The trained values, which all workers print."""
    found = re.findall(r"LEARNT (\w+)(?: \S+ OWN (\w+))?", text)
    assert len(found) >= 2, text
    return {" ".join(values) for values in found}


def under_fleetrun(folder: Path, *command: str) -> set[str]:
    [code], text = finish([start([str(BIN / "fleetrun"), *COUNTS, "--tee", *command], cwd=folder)])
    assert code == 0, text
    return learned(text)


@pytest.fixture(scope="module")
def outlived(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return under_fleetrun(tmp_path_factory.mktemp("outlive"), OUTLIVE)


@pytest.fixture(scope="module")
def ungated(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return under_fleetrun(tmp_path_factory.mktemp("gated"), GATED)


@pytest.mark.parametrize(
    ("options", "rule", "nodes"),
    [
        (("-N4", "-n4"), "spread", ["10.213.7.2", "10.213.7.3"]),
        (("-N2", "-n4", "-m", "cyclic"), "spread", ["10.213.7.2", "10.213.7.3"]),
        (("-N2", "-n4"), "pack", ["10.213.7.2", "10.213.7.2"]),
    ],
)
def test_srun_by_hand(
    login: Login, outlived: set[str], options: tuple[str, ...], rule: str, nodes: list[str]
) -> None:
    variables = {"FLEET_SERVER_NUM": "2", "FLEET_SERVERS": rule, "FLEET_TOKEN": TOKEN}
    done = login.run("srun", *options, sys.executable, OUTLIVE, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert learned(done.stdout) == outlived
    assert sorted(re.findall(r"server \d of 2 listens at ([\d.]+):", done.stderr)) == nodes


def test_two_jobs_of_one_name(login: Login, outlived: set[str]) -> None:
    """Each equals the job under fleetrun, bit for bit."""
    flags = ("--log_dir", str(login.folder / "log"), "--option", "nodes=4")
    others = [Login(login.slurm, login.folder / name) for name in ("a", "b")]
    jobs = [other.submit(OUTLIVE, flags=flags) for other in others]
    for job, other in zip(jobs, others, strict=True):
        text = other.wait_for_end(job)
        assert learned(text) == outlived
        assert "[worker 1] " in text
        assert len(re.findall("LEARNT", other.tool("logs", job, "worker", "1"))) == 1
        assert re.search(r"server 1 +COMPLETED +n2", other.tool("ps", job))


def test_a_job_without_servers(login: Login, tmp_path: Path) -> None:
    [code], text = finish([start([sys.executable, TRAIN], cwd=tmp_path)])
    assert code == 0, text
    job = login.submit(TRAIN, counts=("--nproc_per_node", "2"), flags=("--option", "nodes=2"))
    # from before its start until its end
    followed = login.tool("logs", job, "-f")
    logs = login.wait_for_end(job)
    lines = {line for line in logs.splitlines() if not line.startswith("[slurm]")}
    assert set(followed.splitlines()) == lines
    assert results(logs) == pytest.approx(results(text) * 2, abs=1e-8)
    assert "collective: worker 0 of 2 on 2 hosts" in logs
    assert re.search(r"worker 1 +COMPLETED +n2", login.tool("ps", job))


def test_a_killed_task_resumes_in_place(login: Login, outlived: set[str]) -> None:
    flags = ("--max_restarts", "3", "--option", "nodes=2")
    job = login.submit(OUTLIVE, "--kill", "3", "--die", "1:6:step", flags=flags)
    text = login.wait_for_end(job)
    assert learned(text) == outlived
    assert len(re.findall("killed by SIGKILL", text)) == 2, text
    assert "anyone who reaches" not in text


def test_a_lost_node(login: Login, ungated: set[str]) -> None:
    job = login.submit(GATED, "--gate", "7", "--durability", "log", flags=("--option", "nodes=3"))
    login.wait_for_gate()
    assert re.search(r"server 0 +RUNNING +n1", login.tool("ps", job))
    login.slurm.lose_node(1)
    try:
        login.open_gate()
        login.start_again(job)
        text = login.wait_for_end(job)
        assert learned(text) == ungated
        assert "resuming each worker at its last step" in text
        assert re.search(r"server 0 +COMPLETED +n2 +restarts: 1", login.tool("ps", job))
    finally:
        login.slurm.start_node(1)
        wait_until(lambda: login.slurm.states() == {"idle"}, "the node is back")


@pytest.mark.parametrize("readers", [0, 1])
def test_the_time_limit(login: Login, ungated: set[str], readers: int) -> None:
    """Slurm asks all processes of the job to end; it saves, and resumes after a requeue."""
    flags = ("--checkpoint", "saved", "--option", "nodes=2")
    job = login.submit(GATED, "--gate", "7", "--readers", str(readers), flags=flags)
    login.wait_for_gate()
    login.slurm.ask("scancel", "--signal=TERM", job)
    login.open_gate()
    login.start_again(job)
    text = login.wait_for_end(job)
    assert learned(text) == ungated
    assert "saved at step 8" in text
    assert steps(text) == list(range(24))


def steps(text: str) -> list[int]:
    """The steps of worker 0, in the order in which it made them."""
    return [int(step) for step in re.findall(r"^\[worker 0\] STEP (\d+)", text, re.MULTILINE)]


def test_stop_saves_and_ends(login: Login) -> None:
    job = login.submit(GATED, "--gate", "3", flags=("--checkpoint", "saved"))
    login.wait_for_gate()
    login.tool("stop", job)
    login.open_gate()
    assert steps(login.wait_for_end(job, "FAILED")) == list(range(4))
    facts = login.slurm.job(job)
    assert (facts["ExitCode"], facts["Restarts"]) == ("75:0", "0")
    assert (login.folder / "saved" / "manifest.json").exists()


@pytest.mark.parametrize("durability", ["none", "log"])
def test_scale_resumes_with_other_counts(login: Login, durability: str) -> None:
    arguments = ("--gate", "3", "--durability", durability)
    job = login.submit(GATED, *arguments, flags=("--checkpoint", "saved"))
    login.wait_for_gate()
    printed = login.tool("scale", job, "--worker_num", "3", "--server_num", "1")
    found = re.search(r"scaling: slurm:(\d+)", printed)
    assert found, printed
    login.open_gate()
    before = login.wait_for_end(job, "FAILED")
    after = login.wait_for_end(found[1])
    assert "3 workers, 1 server" in after
    # each record once in each epoch
    ids = re.findall(r"STEP \d+ ([\d ]+)", before + after)
    assert sum(len(batch.split()) for batch in ids) == 2 * 96


def test_stop_cancels_a_job_that_waits(login: Login) -> None:
    job = login.submit(OUTLIVE, flags=("--option", "begin=now+1hour"))
    assert re.search(r"worker 1 +PENDING", login.tool("ps", job))
    login.tool("stop", job)
    assert "CANCELLED" in login.tool("ps", job)


def test_ps_shows_why_a_job_waits(login: Login) -> None:
    """Its nodes have other jobs, or its partition is down; then a user cancels it."""
    whole = login.submit(
        GATED, "--gate", "0", flags=("--option", "nodes=4", "--option", "exclusive=")
    )
    login.wait_for_gate()
    for option, reason in (("nodes=4", "Resources"), ("partition=down", "PartitionDown")):
        job = login.submit(OUTLIVE, flags=("--option", option))
        row = rf"worker 1 +PENDING +{reason}"
        wait_until(lambda: re.search(row, login.tool("ps", job)) is not None, row)  # noqa: B023
        login.slurm.ask("scancel", job)
        assert re.search(r"worker 1 +CANCELLED", login.tool("ps", job))
        assert login.tool("logs", job) == ""
    login.slurm.ask("scancel", whole)
    wait_until(lambda: login.slurm.states() == {"idle"}, "the nodes are free")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partition=none", "Slurm refuses sbatch --parsable: invalid partition specified: none"),
        ("partition=closed", "Required partition not available (inactive or drain)"),
        ("time=9-0", "Slurm refuses sbatch --parsable: Requested time limit is invalid"),
    ],
)
def test_refusals_of_slurm_are_one_line(login: Login, option: str, message: str) -> None:
    words = (str(BIN / "fleetrun"), "--on", "slurm", *COUNTS, "--option", option, OUTLIVE)
    done = login.run(sys.executable, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_workers_join_a_running_job_and_leave_it(login: Login) -> None:
    """The newcomers are another job, on other nodes; `fleetlight stop` lets them leave."""
    with login.with_token(TOKEN):
        job = login.submit(ELASTIC, counts=COUNTS, flags=("--worker_max", "4"))
        wait_until((login.folder / "trained.1").exists, "both workers train")
        found = re.search(r"server 0 of 2 listens at (\S+)", login.tool("logs", job))
        assert found
        more = login.submit(ELASTIC, counts=("--worker_num", "2"), flags=("--join", found[1]))
        wait_until((login.folder / "trained.3").exists, "both newcomers train")
        login.tool("stop", more)
        text = login.wait_for_end(more)
        assert text.count("leaving at step") == 2, text
        (login.folder / "finish").touch()
        text = login.wait_for_end(job)
    [(epochs, low, high)] = set(re.findall(r"epochs (\d+), counts ([\d.]+) to ([\d.]+)", text))
    assert low == high == epochs, text
