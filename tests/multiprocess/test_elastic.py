# SPDX-License-Identifier: Apache-2.0
"""Workers join a running job and leave it, each of them a real process."""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.launch.workplace import outcome
from tests.multiprocess.test_dialects import BIN, start
from tests.workers import reserved_port

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("elastic.py")
WITHIN_S = 90.0
TOKEN = "0123456789abcdef"


class Job:
    """Two servers and two workers, and those that join."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        worker_max: int = 4,
        *,
        announces: str | None = None,
        arguments: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """`announces`: servers have no fixed endpoints, and this process keeps the rendezvous."""
        self.folder, self._arguments = folder, ("--mode", mode, *arguments)
        reserved = [reserved_port() for _ in range(3)]
        self._held, ports = [one for one, _ in reserved], [port for _, port in reserved]
        self.servers = [f"127.0.0.1:{port}" for port in ports[:2]]
        self._common = {"FLEET_TOKEN": TOKEN, "FLEET_DEADLINE_S": "60"}
        self._job = {
            "FLEET_WORKER_NUM": "2",
            **({"FLEET_WORKER_MAX": str(worker_max)} if worker_max else {}),
            "FLEET_SERVER_NUM": "2",
            "FLEET_SERVER_ENDPOINTS": ",".join(self.servers),
            "FLEET_MASTER": f"127.0.0.1:{ports[2]}",
            **variables,
        }
        self.meets_at = self.servers[0]
        if announces:
            del self._job["FLEET_SERVER_ENDPOINTS"]
            self.meets_at = self._job["FLEET_MASTER"]
        if announces == "scheduler":
            self._job["FLEET_SCHEDULER_NUM"] = "1"
        self.processes = {
            f"{role} {index}": self.member(role, index)
            for role in ("server", "worker")
            for index in range(2)
        }
        if announces == "scheduler":
            self.processes["scheduler"] = self.member("scheduler", 0)

    def member(self, role: str, index: int) -> subprocess.Popen[str]:
        return self._start({**self._job, "FLEET_ROLE": role, "FLEET_INDEX": str(index)})

    def join(self, name: str, *arguments: str, **variables: str) -> None:
        self.processes[name] = self._start({"FLEET_JOIN": self.meets_at, **variables}, *arguments)

    def _start(self, variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), *self._arguments, *arguments]
        return start(command, {**self._common, **variables}, self.folder)

    def wait_for(self, *names: str) -> None:
        self.wait(lambda: all((self.folder / name).exists() for name in names), f"{names}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WITHIN_S
        while not condition():
            ended = [n for n, p in self.processes.items() if p.poll() not in (None, 0)]
            assert not ended, f"{ended}: {self.output(*ended)}"
            assert time.monotonic() < end, f"{what} is missing"
            time.sleep(0.01)

    def leave(self, *names: str) -> None:
        """Let workers leave, and wait for their ends."""
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        for name in names:
            output, _ = self.processes[name].communicate(timeout=WITHIN_S)
            assert self.processes.pop(name).returncode == 0, output
            assert "leaving at step" in output

    def output(self, *names: str) -> str:
        return "\n".join(self.processes[name].communicate(timeout=WITHIN_S)[0] for name in names)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
        for holder in self._held:
            holder.close()

    def finish(self) -> str:
        """End the training; returns what the workers printed."""
        (self.folder / "finish").touch()
        outputs = {name: self.output(name) for name in self.processes}
        for name, process in self.processes.items():
            assert process.returncode == 0, f"{name}: {outputs[name]}"
        return "\n".join(outputs.values())

    def check_read_once(self, epochs: int) -> None:
        """Each record of each epoch was read by one worker, once."""
        for epoch in range(epochs):
            read = collections.Counter(
                record
                for path in self.folder.glob(f"read.*.{epoch}")
                for record in path.read_text().split()
            )
            assert sorted(read, key=int) == [str(record) for record in range(600)], epoch
            assert set(read.values()) == {1}, (epoch, read.most_common(3))


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    running = Job(tmp_path, getattr(request, "param", "async"))
    yield running
    running.end()


@pytest.mark.parametrize("job", ["async", "staleness", "geo", "sync"], indirect=True)
def test_two_workers_become_four_and_then_one(job: Job, request: pytest.FixtureRequest) -> None:
    mode = request.node.callspec.params["job"]
    job.wait_for("trained.0", "trained.1")
    job.join("first")
    job.join("second")
    job.wait_for("trained.2", "trained.3")
    job.leave("worker 1", "first", "second")
    text = job.finish()
    [(epochs, low, high, schedule, workers)] = re.findall(
        r"epochs (\d+), counts ([\d.]+) to ([\d.]+), scheduler (\d+), .*, workers (\d+)", text
    )
    assert (int(schedule), workers) == (int(epochs), "1")
    job.check_read_once(int(epochs))
    if mode in ("async", "staleness"):
        assert low == high == epochs
    joins = re.findall(r"worker (\d) joins: (\d) workers from now on; learning rates stay", text)
    assert sorted(worker for worker, _ in joins) == ["2", "3"]
    assert [count for _, count in joins] == ["3", "4"]


def test_newcomer_takes_the_state_of_worker_0_and_a_place_that_is_free_again(job: Job) -> None:
    job.wait_for("trained.0", "trained.1")
    job.join("first")
    job.join("second")
    job.wait_for("trained.2", "trained.3")
    job.leave("worker 1")
    (job.folder / "trained.1").unlink()
    job.join("third")
    job.wait_for("trained.1")
    text = job.finish()
    found = re.findall(r"WORKER (\d): epochs (\d+), .*, scheduler (\d+), mark ([\d.]+),", text)
    assert {index for index, *_ in found} == {"0", "1", "2", "3"}, text
    assert len({tuple(rest) for _, *rest in found}) == 1, found


@pytest.mark.parametrize("kept_by", ["server 0", "scheduler"])
def test_workers_join_servers_that_announce_themselves(kept_by: str, tmp_path: Path) -> None:
    job = Job(tmp_path, "async", announces=kept_by)
    try:
        job.wait_for("trained.0", "trained.1")
        job.join("first")
        job.wait_for("trained.2")
        job.leave("first")
        [epochs, *_] = re.findall(r"epochs (\d+)", job.finish())
        job.check_read_once(int(epochs))
    finally:
        job.end()


def test_full_job_a_foreign_script_and_a_foreign_torch_are_refused(job: Job) -> None:
    job.wait_for("trained.0", "trained.1")
    job.join("wide", "--wide")
    output = job.output("wide")
    assert job.processes.pop("wide").returncode == 78, output
    assert "have different plans" in output
    job.join("longer", "--records", "4096")
    output = job.output("longer")
    assert job.processes.pop("longer").returncode not in (0, None)
    assert re.search(r"this worker has records 4096, worker 0 has \d+; read the same data", output)
    assert not list(job.folder.glob("trained.2")), "it must not have trained"
    foreign = job.folder / "sitecustomize.py"
    foreign.write_text("import torch; torch.__version__ = '2.99.0'\n")
    job.join("foreign", PYTHONPATH=f"{job.folder}:{':'.join(sys.path[1:])}")
    output = job.output("foreign")
    foreign.unlink()
    assert job.processes.pop("foreign").returncode not in (0, None)
    assert "wants to join with torch 2.99.0" in output, output
    job.join("first")
    job.join("second")
    job.wait_for("trained.2", "trained.3")
    job.join("third")
    output = job.output("third")
    assert job.processes.pop("third").returncode not in (0, None)
    assert "all 4 places of the job are taken" in output, output
    job.finish()


def test_workers_that_leave_their_loops_early_are_joined(tmp_path: Path) -> None:
    job = Job(tmp_path, "async", arguments=("--batches", "20"))
    try:
        job.wait_for("trained.0", "trained.1")
        job.join("first")
        job.wait_for("trained.2")
        [epochs, *others] = re.findall(r"epochs (\d+)", job.finish())
        assert others == [epochs, epochs]
        for epoch in range(int(epochs)):
            read = [r for f in tmp_path.glob(f"read.*.{epoch}") for r in f.read_text().split()]
            assert len(read) == len(set(read))
    finally:
        job.end()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_newcomer_stops_and_saves_with_the_others(mode: str, tmp_path: Path) -> None:
    """It does not know the folder of the checkpoint: server 0 does."""
    job = Job(tmp_path, mode, FLEET_CHECKPOINT=str(tmp_path / "ck"))
    try:
        job.wait_for("trained.0", "trained.1")
        job.join("first")
        job.wait_for("trained.2")
        job.processes["worker 0"].send_signal(signal.SIGTERM)
        outputs = {name: job.output(name) for name in job.processes}
        codes = {name: process.returncode for name, process in job.processes.items()}
        assert set(codes.values()) == {75}, (codes, outputs)
        assert (tmp_path / "ck" / "manifest.json").exists()
    finally:
        job.end()


@pytest.mark.gate
def test_a_killed_worker_is_replaced_by_a_newcomer(job: Job) -> None:
    job.wait_for("trained.0", "trained.1")
    job.processes["worker 1"].kill()
    job.processes.pop("worker 1").communicate()
    job.join("first")
    job.wait_for("trained.2")
    text = job.finish()
    assert "worker 1 disconnected without goodbye" in text
    assert "the other workers continue without it" in text


def test_fleetrun_adds_workers_to_its_job_and_takes_them_away(tmp_path: Path) -> None:
    fleetrun = [str(BIN / "fleetrun")]
    main = start(
        [*fleetrun, "--server_num", "1", "--worker_num", "1", "--worker_max", "3", str(SCRIPT)],
        cwd=tmp_path,
    )
    try:
        wait_until(lambda: (tmp_path / "trained.0").exists(), main)
        more = start([*fleetrun, "--join", "log", "--worker_num", "2", str(SCRIPT)], cwd=tmp_path)
        try:
            trained = [tmp_path / f"trained.{n}" for n in (1, 2)]
            wait_until(lambda: all(path.exists() for path in trained), more)
            more.send_signal(signal.SIGTERM)
            output, _ = more.communicate(timeout=WITHIN_S)
        finally:
            more.kill()
            more.communicate()
        assert more.returncode == 0, output
        assert "leaving at step" in output
        (tmp_path / "finish").touch()
        output, _ = main.communicate(timeout=WITHIN_S)
    finally:
        main.kill()
        main.communicate()
    assert main.returncode == 0, output
    assert "fleetrun --join " in output
    [(epochs, low, high)] = re.findall(r"epochs (\d+), counts ([\d.]+) to ([\d.]+)", output)
    assert low == high == epochs
    assert not (tmp_path / "log" / "join.json").exists()


def test_a_call_whose_newcomers_were_all_killed_fails(tmp_path: Path) -> None:
    job = Job(tmp_path, "async")
    try:
        job.wait_for("trained.0", "trained.1")
        flags = ["--join", job.servers[0], "--worker_num", "1", "--log_dir", "more"]
        command = [str(BIN / "fleetrun"), *flags, str(SCRIPT), "--mode", "async"]
        more = start(command, {"FLEET_TOKEN": TOKEN}, tmp_path)
        job.wait_for("trained.2")
        [record] = (tmp_path / "more").glob("launcher.*.json")
        [process] = json.loads(record.read_text())["processes"]
        os.kill(process["pid"], signal.SIGKILL)
        output, _ = more.communicate(timeout=WITHIN_S)
        assert more.returncode == 128 + signal.SIGKILL, output
        assert "failed: worker 0 of 1 was killed by SIGKILL" in outcome(output)
        job.finish()
    finally:
        job.end()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for what a process does; what it printed if it ended before, or is late."""
    end = time.monotonic() + WITHIN_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.terminate()
            pytest.fail(process.communicate(timeout=WITHIN_S)[0])
        time.sleep(0.01)


def test_joining_a_job_of_fixed_size_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, "async", worker_max=0)
    try:
        job.wait_for("trained.0", "trained.1")
        job.join("first")
        output = job.output("first")
        assert job.processes.pop("first").returncode not in (0, None)
        assert "this job keeps its 2 workers" in output, output
        job.finish()
    finally:
        job.end()
