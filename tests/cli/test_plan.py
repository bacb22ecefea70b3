# SPDX-License-Identifier: Apache-2.0
"""`fleetlight plan`: its flags, what it prints, and a script that it runs."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import msgspec
import pytest
from tests.launch.capacity.workloads import HERE, profile

from fleetlight.cli.fleetlight import main
from fleetlight.launch.capacity import probe
from fleetlight.launch.capacity.profile import load, save


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile of this machine."""
    monkeypatch.setattr(probe, "this_machine", lambda: HERE)
    path = tmp_path / "p.json"
    save(profile(), path)
    return str(path)


def test_a_plan_has_a_row_for_each_layout(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "1,50", "--servers", "1,3", "--link_gbit", "10"]
    assert main(["plan", "--profile", file, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sync, batch 100; a step: 20 ms CPU")
    rows = [line.split()[:2] for line in lines[3:]]
    assert rows == [["1", "1"], ["50", "1"], ["1", "3"], ["50", "3"]]


def test_flags_reach_the_layouts(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers_per_host", "3", "--cores", "5", "--shared_cores", "7", "--link_gbit", "0.2"]
    flags += ["--round_trip_ms", "2", "--rows", "11"]
    assert main(["plan", "--json", "--profile", file, *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told["differences"], told["machine"]["cpu"]] == [[], "here"]
    assert told["predictions"][0]["layout"] == {
        "workers": 1,
        "servers": 1,
        "workers_per_host": 3,
        "cores": 5,
        "link_bits_per_s": 2e8,
        "round_trip_s": 0.002,
        "total_cores": 7,
        "rows": 11,
    }
    assert len(told["predictions"]) == 15


def test_a_plan_from_another_machine_says_so(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = msgspec.structs.replace(HERE, cores=8, cpu="there")
    save(profile(other), pathlib.Path(file))
    assert main(["plan", "--profile", file]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == ("from the profile of another machine: cpu there (here here), cores 8 (here 2)")


def test_a_plan_measured_on_a_busy_machine_says_so(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(profile(other_programs=0.3), pathlib.Path(file))
    assert main(["plan", "--profile", file]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("other programs used 30% of the machine meanwhile, expected at most")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "got no script, expected either: fleetlight plan SCRIPT"),
        (["--profile", "FILE", "train.py"], "got both a script and --profile"),
        (["--profile", "FILE", "--save_profile", "x"], "omit --profile"),
        (["--profile", "FILE", "--workers", "1,x"], "--workers '1,x': expected numbers of 1"),
        (["--profile", "FILE", "--servers", "0"], "--servers '0': expected numbers of 1"),
        (["--profile", "FILE", "--link_gbit", "0"], "--link_gbit 0: expected more than 0"),
        (["--profile", "FILE", "--link_gbit", "nan"], "--link_gbit nan: expected more than 0"),
        (["--profile", "FILE", "--cores", "-1"], "--cores -1: expected more than 0"),
        (["--profile", "FILE", "--round_trip_ms", "-1"], "--round_trip_ms -1: expected at least 0"),
        (["--profile", "missing.json"], "cannot read the profile missing.json"),
        (["missing.py"], "script 'missing.py' does not exist"),
    ],
)
def test_wrong_flags_are_errors(
    flags: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(file if word == "FILE" else word for word in flags)]) == 1
    assert message in capsys.readouterr().err


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import fleetlight as fleet

fleet.init()
model = torch.nn.Sequential(fleet.nn.SparseEmbedding(4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
model = fleet.distributed_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy())
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    records = TensorDataset(torch.arange(640).view(320, 2))
    loader = fleet.shard(DataLoader(records, 32))
    for epoch in range(int(sys.argv[1])):
        for (ids,) in loader:
            loss = model(ids).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    fleet.stop_worker()
"""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's counters")


@linux_only
@pytest.mark.long
@pytest.mark.multiprocess
def test_a_script_is_measured_and_predicted(
    script: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.iterdir())
    flags = ["--workers", "1,1000", "--servers", "1", "--save_profile", "p.json"]
    assert main(["plan", *flags, "--deadline_s", "120", script, "1000000"]) == 0
    shown = capsys.readouterr()
    rows = shown.out.splitlines()[-2:]
    assert [line.split()[:2] for line in rows] == [["1", "1"], ["1000", "1"]]
    assert "measuring train.py with 1 worker and " in shown.err
    work = load(tmp_path / "p.json").workload
    assert (work.mode, work.batch, work.rows) == ("sync", 32, 640)
    # 64 ids and gradients of 4 floats, 9 dense ones, and headers
    assert 64 * (8 + 16) + 36 < work.lanes["push"].sent.at(1) < 64 * (8 + 16) + 36 + 1000
    assert work.worker_cpu_s.at(1) > 0 < work.server_cpu_s.at(1)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "p.json"}


@linux_only
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("1", r"the script ended early: the probe saw \d+ steps?, expected at least 20"),
        ("x", "invalid literal for int"),
    ],
)
def test_a_script_that_ends_early_is_an_error(
    script: str, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--deadline_s", "120", script, argument]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_plan_tells_the_goodput(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "1000", "--servers", "100", "--mtbf_days", "10,100", "--restart_s", "120"]
    assert main(["plan", "--profile", file, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    # the profile is one of sync mode
    assert [line.split() for line in lines[-2:]] == [
        ["1000", "100", "10", "days", "4.58", "81.6%", "40", "s", "86.7%"],
        ["1000", "100", "100", "days", "0.458", "96.9%", "125", "s", "98.5%"],
    ]
    assert main(["plan", "--json", "--profile", file, *flags]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert [one["mtbf_days"] for one in found] == [10, 100]


@pytest.mark.parametrize("flags", [["--mtbf_days", "0"], ["--save_s", "0"], ["--restart_s", "nan"]])
def test_wrong_failures_are_refused(
    flags: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile", file, *flags]) == 1
    assert f"{flags[0]} " in capsys.readouterr().err
