# SPDX-License-Identifier: Apache-2.0
"""`fleetlight trace` of a running job: workers, servers, torch, and arrows between them."""

import json
import re
from pathlib import Path

import pytest
from tests.launch.workplace import Workplace

from fleetlight.cli.fleetlight import main

TRAIN = """
    import os, pathlib, sys, time
    if os.environ["FLEET_ROLE"] == "server":
        of_worker, ns_of_worker = time.time, time.time_ns
        time.time = lambda: of_worker() + 1000
        time.time_ns = lambda: ns_of_worker() + 1000 * 10**9
    import torch
    import fleetlight as fleet
    from fleetlight.fleet.recording import tracing
    from fleetlight.launch.process_identity import System
    if os.environ["FLEET_ROLE"] == "server":
        tracing.this_system = lambda: System("another host", "", "")

    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(4), torch.nn.Linear(4, 1))
    model = fleet.distributed_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        sys.exit()
    fleet.init_worker()
    while not pathlib.Path("enough").exists():
        optimizer.zero_grad()
        model(torch.randint(0, 100, (16,))).square().mean().backward()
        optimizer.step()
        pathlib.Path("seen").write_text("a step\\n")
    fleet.stop_worker()
"""


@pytest.mark.long
def test_some_steps_of_all_processes_are_in_one_file(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's clock is ahead of that of the workers, as if it were another host's."""
    job = place.start("--server_num", "1", "--worker_num", "2", place.script(TRAIN))
    place.wait_for("seen")
    output = place.path / "trace.json"
    try:
        code = main(["trace", str(place.path / "log"), "--steps", "3", "--output", str(output)])
    finally:
        (place.path / "enough").touch()
    assert code == 0
    assert job.end()[0] == 0
    events = json.loads(output.read_text())["traceEvents"]
    spans = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    # worker 0, worker 1, server 0
    for worker in (1, 2):
        assert {(worker, "forward"), (worker, "backward"), (worker, "push")} <= spans
        assert any(pid == worker and name.startswith("aten::") for pid, name in spans)
    assert (3, "push") in spans
    begun = {e["id"] for e in events if e["ph"] == "s" and e.get("cat") == "fleetlight"}
    ended = {e["id"] for e in events if e["ph"] == "f" and e.get("cat") == "fleetlight"}
    assert begun & ended
    times = [e["ts"] for e in events if e["ph"] == "X" and e["name"] == "push"]
    assert max(times) - min(times) < 500e6
    line = (
        r"server 0: the clock there is ([0-9.]+) ms ahead of that of worker 0 \(within ([0-9.]+) ms"
    )
    [(ahead, error)] = re.findall(line, capsys.readouterr().out)
    assert abs(float(ahead) - 1e6) <= float(error) + 0.02
    assert not list((place.path / "log" / "metrics").glob("trace-*"))


def test_a_job_not_running_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) != 0
    assert "no worker of a job with this log folder runs" in capsys.readouterr().err
