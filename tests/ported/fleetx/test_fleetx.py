# SPDX-License-Identifier: Apache-2.0
"""FleetX' cluster quick start, line by line; `README.md` has a table of claims and tests."""

import logging
from pathlib import Path

import pytest
import torch
from tests.launch.workplace import free_ports
from tests.ported.jobs import FLEETRUN, ended, logs, numbers, run, start
from tests.workers import reserved_port

import fleetlight as fleet
from fleetlight.collective.membership import rendezvous
from fleetlight.errors import MembershipError

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
LOSS = r"loss: ([\d.]+)"


@pytest.mark.parametrize("kind", ["static", "dygraph"])
def test_collective_training_learns(kind: str, tmp_path: Path) -> None:
    output = run(tmp_path, *FLEETRUN, "--nproc_per_node", "2", HERE / f"train_fleet_{kind}.py")
    assert ": workers 0 to 1 of 2" in output
    assert "all_reduce: 8 -> 1" in output
    for text in logs(tmp_path / "log"):
        losses, top5 = numbers(LOSS, text), numbers(r"acc5: ([\d.]+)", text)
        assert len(losses) == 3 * 2
        assert losses[-1] < 0.7 * losses[0]
        assert top5[-1] > top5[0]


def test_the_launcher_shows_what_the_document_says(tmp_path: Path) -> None:
    flags = ["-v", "--server_num=1", "--worker_num=2"]
    output = run(tmp_path, *FLEETRUN, *flags, HERE / "train.py", "sync")
    for words in (
        "-----------  Configuration Arguments -----------",
        "server_num: 1",
        "Value (server 0)",
        "Value (worker 0)",
        "logs: log/serverlog.N, log/workerlog.N",
    ):
        assert words in output
    assert "worker 1" in (tmp_path / "log" / "endpoints.log").read_text()


def test_a_waiting_worker_names_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # every 3 s, as in the document
    assert rendezvous._REPORT_EVERY_S == 3
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_S", 0.0)
    holder, port = reserved_port()
    with holder, caplog.at_level(logging.WARNING, "fleetlight"):
        with pytest.raises(MembershipError, match="worker 0 did not listen"):
            rendezvous.join(("127.0.0.1", port), rendezvous.RendezvousDeadline(0.2), "worker 0")
        store = rendezvous.serve(("127.0.0.1", 0), rendezvous.RendezvousDeadline(10.0))
        listed = ["127.0.0.1:10039", "127.0.0.1:31719"]
        with pytest.raises(MembershipError):
            rendezvous.gather(store, 2, listed, rendezvous.RendezvousDeadline(0.2))
    messages = [record.getMessage() for record in caplog.records]
    assert f"not ready endpoints: ['127.0.0.1:{port}'] (worker 0)" in messages
    assert "not ready endpoints: ['127.0.0.1:10039', '127.0.0.1:31719']" in messages


def test_several_machines_train_together(tmp_path: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    flags = [f"--ips={','.join(hosts)}", "--start_port", str(free_ports(hosts, 4))]
    script = HERE / "train_fleet_static.py"
    launchers = [
        start(tmp_path, *FLEETRUN, *flags, "--host", host, "--nproc_per_node", "1", script)
        for host in hosts
    ]
    for output in ended(*launchers):
        assert "done: all 2 workers on 2 machines exited with code 0" in output


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_parameter_servers_train_in_every_mode(mode: str, tmp_path: Path) -> None:
    flags = ["--server_num=1", "--worker_num=2", "--gpus=0,1"]
    output = run(tmp_path, *FLEETRUN, *flags, HERE / "train.py", mode, CUDA_VISIBLE_DEVICES="")
    assert "this machine has no GPU; workers use CPUs" in output
    assert "done: all 2 workers exited with code 0" in output
    for text in logs(tmp_path / "log"):
        losses = numbers(LOSS, text)
        assert len(losses) == 4 * 50
        assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    scores = fleet.load_inference_model(tmp_path / "served")(torch.randint(0, 200, (7, 4)))
    assert scores.shape == (7, 1)
    assert ((scores > 0) & (scores < 1)).all()
