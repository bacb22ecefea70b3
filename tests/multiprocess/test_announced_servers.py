# SPDX-License-Identifier: Apache-2.0
"""Jobs whose servers announce where they listen, also after a restart at another address."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.test_dialects import clean, finish, results, start
from tests.warm_scripts import WarmScript
from tests.workers import reserved_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
SERVE, OUTLIVE = str(HERE / "serve.py"), str(HERE / "outlive.py")
TOKEN = "0123456789abcdef0123456789abcdef"


class Members:
    """The processes of a job, as an engine starts and restarts them."""

    def __init__(self, script: str, common: Mapping[str, str], cwd: Path, *arguments: str) -> None:
        self._command = [sys.executable, script, *arguments]
        self._common, self._cwd = dict(common), cwd
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._output = ""

    def start(self, name: str, role: Mapping[str, str]) -> None:
        """Start a member."""
        self.running[name] = start(self._command, self._common | dict(role), self._cwd)

    def wait_for(self, name: str) -> int:
        """Wait for the end of a member; returns its exit code."""
        self._output += self.running[name].communicate(timeout=120)[0]
        return int(self.running.pop(name).returncode)

    def finish(self) -> str:
        """Wait for all; returns what they printed."""
        codes, text = finish(list(self.running.values()))
        text = self._output + text
        assert set(codes) == {0}, text
        return text


def roles(servers: int, workers: int, *, indices: bool = True) -> Sequence[dict[str, str]]:
    """The variables that distinguish the members."""
    kinds = [("server", n) for n in range(servers)] + [("worker", n) for n in range(workers)]
    return [
        {"FLEET_ROLE": kind, **({"FLEET_INDEX": str(n)} if indices else {})} for kind, n in kinds
    ]


def counts(port: int) -> dict[str, str]:
    """The variables that all members share: the counts, and where the job meets."""
    return {
        "FLEET_WORKER_NUM": "2",
        "FLEET_SERVER_NUM": "2",
        "FLEET_MASTER": f"127.0.0.1:{port}",
        "FLEET_TOKEN": TOKEN,
    }


def serve(*variables: Mapping[str, str]) -> str:
    """Run `serve.py` in a process for each of these variables; returns what they printed."""
    code = f"import runpy; runpy.run_path({SERVE!r}, run_name='__main__')"
    scripts = [WarmScript(code, clean() | one) for one in variables]
    text = "".join(script.communicate()[0] for script in scripts)
    assert {script.returncode for script in scripts} == {0}, text
    return text


@pytest.fixture(scope="module")
def expected() -> float:
    [total] = results(serve({}))
    return total


@pytest.mark.parametrize("kept_by", ["server 0", "the scheduler"])
def test_members_need_no_list_of_endpoints(kept_by: str, expected: float) -> None:
    holder, port = reserved_port()
    is_scheduled = kept_by == "the scheduler"
    common, members = counts(port), list(roles(2, 2, indices=not is_scheduled))
    if is_scheduled:
        common["FLEET_SCHEDULER_NUM"] = "1"
        members.append({"FLEET_ROLE": "scheduler"})
    with holder:
        text = serve(*(common | member for member in members))
    assert results(text) == pytest.approx([expected] * 2, rel=1e-5)
    if is_scheduled:
        assert "cluster formed: 2 workers and 2 servers" in text
        assert "all servers have left" in text


def learned(text: str) -> tuple[set[str], set[str]]:
    found = re.findall(r"LEARNT (\w+) \S+ OWN (\w+)", text)
    assert len(found) == 2, text
    return {shared for shared, _ in found}, {own for _, own in found}


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["FLEET", "MS"])
def test_a_server_goes_on_at_another_address(dialect: str, tmp_path: Path) -> None:
    """An engine restarts it on another host, which sees the folder with its log.

    Before the second time, the scheduler is killed, too: its successor knows nothing. A worker
    that dies after that still finds its index and place.
    """

    def trained(folder: Path, *kills: str) -> tuple[set[str], set[str]]:
        folder.mkdir()
        holder, port = reserved_port()
        common, scheduler, servers, workers, address = variables(dialect, port)
        dying = ["--die", "1:8:forward"] if kills else []
        members = Members(OUTLIVE, common, folder, "--kill", *kills, *dying)
        with holder:
            members.start("scheduler", scheduler)
            for n in range(2):
                members.start(f"server {n}", {**servers, **identity(dialect, n)})
                members.start(f"worker {n}", {**workers, **identity(dialect, n)})
            for number, step in enumerate(kills):
                name = int(step) % 2
                assert members.wait_for(f"server {name}") == -signal.SIGKILL
                if number:
                    members.running["scheduler"].kill()
                    assert members.wait_for("scheduler") == -signal.SIGKILL
                    members.start("scheduler", scheduler)
                elsewhere = {address: f"127.0.0.{number + 2}"}
                again = {**servers, **identity(dialect, name), **elsewhere}
                members.start(f"server {name}", again)
            if kills:
                assert members.wait_for("worker 1") == -signal.SIGKILL
                members.start("worker 1", {**workers, **identity(dialect, 1)})
            text = members.finish()
        for number, step in enumerate(kills):
            assert f"server {int(step) % 2} of 2 listens at 127.0.0.{number + 2}:" in text, text
        return learned(text)

    assert trained(tmp_path / "killed", "3", "6") == trained(tmp_path / "quiet")


def variables(dialect: str, port: int) -> tuple[Any, ...]:
    """What all members, the scheduler, servers and workers need, and the name of an address."""
    job = {"FLEET_JOB": "job", "FLEET_TOKEN": TOKEN}
    if dialect == "FLEET":
        kinds = [{"FLEET_ROLE": kind} for kind in ("scheduler", "server", "worker")]
        return {**counts(port), **job, "FLEET_SCHEDULER_NUM": "1"}, *kinds, "FLEET_HOST"
    common = {
        "MS_WORKER_NUM": "2",
        "MS_SERVER_NUM": "2",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
    }
    kinds = [{"MS_ROLE": kind} for kind in ("MS_SCHED", "MS_PSERVER", "MS_WORKER")]
    return {**common, **job}, *kinds, "MS_WORKER_IP"


def identity(dialect: str, index: int) -> dict[str, str]:
    """The variable by which a restarted process is known."""
    return {"FLEET_INDEX" if dialect == "FLEET" else "MS_NODE_ID": str(index)}
