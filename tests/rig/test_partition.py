# SPDX-License-Identifier: Apache-2.0
"""A network partition of two machines: the job continues with an exact result."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rig.hosts import hosts
from tests.launch.workplace import Workplace, wait_until
from tests.rig.needed import NEEDED, run_on
from tests.workers import WorkerFailedError
from torch import nn

import fleetlight as fleet
from fleetlight.errors import DeadlineError

pytestmark = NEEDED

STEPS = 40

#: every step adds exactly 1 to the weight; the link is cut before step 5, and the workers stay
#: until the launchers are connected again
WORK = f"""
    import pathlib, sys, time, torch
    import fleetlight as fleet
    served, strategy = sys.argv[1] == "served", fleet.DistributedStrategy()
    fleet.init(is_collective=not served, strategy=strategy)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model = fleet.distributed_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        if served:
            fleet.init_worker()
        for step in range({STEPS}):
            if step == 5:
                pathlib.Path(f"ready.{{fleet.worker_index()}}").touch()
                while not pathlib.Path("cut").exists():
                    time.sleep(0.01)
            optimizer.zero_grad()
            (-model(torch.ones(1, 1)).sum()).backward()
            optimizer.step()
        with torch.no_grad():
            value = float(model(torch.ones(1, 1)))
        pathlib.Path(f"value.{{fleet.worker_index()}}").write_text(f"{{value}}\\n")
        while not pathlib.Path("seen").exists():
            time.sleep(0.01)
        fleet.stop_worker()
"""


def check(place: Workplace, mode: str, cut_s: float, deadline_s: float) -> None:
    """Cut the link of host 1 for so long while both workers train."""
    flags = ["--server_num", "1", "--worker_num", "1"] if mode == "served" else []
    script = place.script(WORK)
    with hosts(2) as rig:
        flags += ["--ips", rig.ips, "--deadline_s", str(deadline_s)]
        jobs = []
        for number, host in enumerate(rig.hosts):
            place.prefix = host.prefix
            jobs.append(place.start(*flags, "--log_dir", f"log{number}", script, mode))
        for worker in (0, 1):
            wait_until((place.path / f"ready.{worker}").exists, f"worker {worker} to train")
        rig.hosts[1].cut()
        (place.path / "cut").touch()
        time.sleep(cut_s)
        rig.hosts[1].mend()
        jobs[0].wait_for_line(f"node 1 ({rig.addresses[1]}) is back after")
        jobs[1].wait_for_line("node 0, which serves 10.213.7.1:6170, is back after")
        (place.path / "seen").touch()
        (code, first), (other_code, second) = (job.end() for job in jobs)
    assert (code, other_code) == (0, 0), first + second
    assert [place.wait_for(f"value.{worker}") for worker in (0, 1)] == [f"{STEPS:.1f}\n"] * 2
    other = rig.addresses[1]
    assert f"node 1 ({other}) sends no heartbeats" in first, first
    assert "node 0, which serves 10.213.7.1:6170, is unreachable" in second, second


@pytest.mark.parametrize("mode", ["collective", "served"])
def test_partition_shorter_than_the_deadline_is_survived(place: Workplace, mode: str) -> None:
    check(place, mode, cut_s=12.0, deadline_s=40.0)


@pytest.mark.long
# after a minute of silence a connection may send again only a minute later
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["collective", "served"])
def test_partition_of_a_minute_is_survived(place: Workplace, mode: str) -> None:
    check(place, mode, cut_s=60.0, deadline_s=300.0)


# -- A host that disappears during a reduction: all workers end and name it


DEADLINE_S = 15.0
#: workers 1 and 4 are on the second of three hosts
PLACES = (0, 1, 2, 0, 1)


def train(seen: Path) -> None:
    """Reduce hierarchically until it fails; `seen` counts successful steps."""
    plain = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    try:
        for step in range(1_000_000):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            if step == 3 and fleet.is_first_worker():
                seen.touch()
    except DeadlineError as error:
        # as at the end of a script: report to the others, which may ask worker 0
        sys.excepthook(type(error), error, None)
        raise


def ends(cut: int, seen: Path) -> list[str]:
    """The errors of the workers when this host is cut off during their reductions."""
    with hosts(3) as rig:

        def pull() -> None:
            wait_until(seen.exists, "the first reductions")
            rig.hosts[cut].cut()

        puller = threading.Thread(target=pull)
        puller.start()
        with pytest.raises(WorkerFailedError) as failed:
            run_on(rig, PLACES, train, seen, deadline_s=DEADLINE_S)
        puller.join()
    texts = str(failed.value).split("\nworker ")
    return [text.rstrip("\n").rpartition("\n")[2] for text in texts]


def test_remaining_workers_name_the_lost_ones(tmp_path: Path) -> None:
    errors = ends(1, tmp_path / "seen")
    assert len(errors) == len(PLACES)
    assert all("DeadlineError: all_reduce of the gradients at step" in text for text in errors)
    for index in (0, 2, 3):
        assert "worker 1 (pid " in errors[index]
        assert "(10.213.7.2)) has been silent for" in errors[index]
    # the workers that were cut off miss the others
    for index in (1, 4):
        assert "worker 0 (pid " in errors[index]
        assert (
            "(10.213.7.1)), which serves the job's rendezvous store, does not reply"
            in errors[index]
        )


def test_remaining_workers_name_the_host_of_the_store(tmp_path: Path) -> None:
    errors = ends(0, tmp_path / "seen")
    assert len(errors) == len(PLACES)
    for index in (1, 2, 4):
        assert "worker 0 (pid " in errors[index]
        assert (
            "(10.213.7.1)), which serves the job's rendezvous store, does not reply"
            in errors[index]
        )
    for index in (0, 3):
        assert "worker 1 (pid " in errors[index]
        assert "(10.213.7.2)) has been silent for" in errors[index]
