# SPDX-License-Identifier: Apache-2.0
"""Real jobs from outside: which process listens where, and that the token stays secret."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch.workplace import free_ports, wait_until
from tests.multiprocess.sockets import descendants, listening
from tests.multiprocess.test_dialects import BIN, finish, start
from tests.workers import reserved_port

import fleetlight
from fleetlight.errors import MembershipError
from fleetlight.launch.exit_codes import PERMANENT
from fleetlight.ps.messages import Greeting
from fleetlight.ps.transport import SocketChannel
from fleetlight.roles import parse_endpoints
from fleetlight.roles.secret import Secret

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = str(Path(__file__).with_name("hold.py"))
TOKEN = "3f9ac27e51d0b8463f9ac27e51d0b846"
SERVED = ["--server_num", "1", "--worker_num", "2"]
Process = subprocess.Popen[str]


@contextlib.contextmanager
def training_job(place: Path, flags: list[str], workers: int = 2, **env: str) -> Iterator[Process]:
    """A job that pauses within its training."""
    collective = ["--collective"] if "--server_num" not in flags else []
    process = start([str(BIN / "fleetrun"), "--tee", *flags, SCRIPT, *collective], env, cwd=place)
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or all((place / f"trained.{index}").exists() for index in range(workers))
            ),
            "the workers to train",
        )
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def finish_job(place: Path, process: Process, how: str = "well") -> tuple[int, str]:
    """Let the job end; returns its exit code and output."""
    # whole at once, since the processes look for it
    fresh = place / "go.new"
    fresh.write_text(how)
    fresh.replace(place / "go")
    codes, text = finish([process])
    return codes[0], text


def logs(place: Path) -> dict[str, str]:
    return {str(file): file.read_text() for file in (place / "log").rglob("*") if file.is_file()}


def reports(place: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(place.glob("*er.*.json"))]


def command_lines() -> str:
    """The output of `ps` for all processes."""
    parts = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            parts.append((folder / "cmdline").read_bytes().decode(errors="replace"))
    return "\n".join(parts)


def server_of(place: Path) -> tuple[str, int]:
    found = next(line for line in (place / "log/endpoints.log").read_text().splitlines()
                 if "server" in line and ":" in line)  # fmt: skip
    return parse_endpoints(found.split()[-1], "the test")[0]


@pytest.mark.parametrize("how", ["well", "fail"])
def test_token_of_a_job_stays_secret(how: str, tmp_path: Path) -> None:
    with training_job(tmp_path, SERVED, FLEET_TOKEN=TOKEN) as process:
        seen = command_lines()
        code, text = finish_job(tmp_path, process, how)
    assert (code != 0) == (how == "fail"), text
    assert ("on purpose" in text) == (how == "fail")
    assert [report["token"] for report in reports(tmp_path)] == [TOKEN] * 3
    assert "token=Secret('***')" in text, "a role was printed"
    everything = {"ps": seen, "terminal": text, **logs(tmp_path)}
    assert len(everything) >= 6
    assert not [name for name, output in everything.items() if TOKEN in output]


def test_job_on_one_machine_has_its_own_token(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "other"):
        place = tmp_path / name
        place.mkdir()
        with training_job(place, SERVED) as process:
            refuses_strangers(place)
            seen = command_lines()
            code, text = finish_job(place, process)
        assert code == 0, text
        [token] = {report["token"] for report in reports(place)}
        assert len(token) == 64
        assert not [output for output in (seen, text, *logs(place).values()) if token in output]
        tokens.append(token)
    assert tokens[0] != tokens[1]


def refuses_strangers(place: Path) -> None:
    hello = Greeting(fleetlight.__version__, 1, 2, 0, 1, 1, "control")
    for token, why in ((None, "has no token"), (Secret(TOKEN), "does not know the token")):
        with pytest.raises(MembershipError, match=why):
            SocketChannel.connect(
                server_of(place), "server 0", deadline_s=20.0, token=token, greeting=lambda: hello
            )


@pytest.mark.parametrize("flags", [SERVED, ["--nproc_per_node", "2"]], ids=["served", "collective"])
def test_nothing_listens_on_all_interfaces(flags: list[str], tmp_path: Path) -> None:
    with training_job(tmp_path, flags) as process:
        found = listening(descendants(process.pid))
        code, text = finish_job(tmp_path, process)
    assert code == 0, text
    addresses = {address for each in found.values() for address in each}
    assert addresses, "servers and stores listen"
    assert all(address.startswith(("127.", "::1:")) for address in addresses), addresses


@pytest.mark.gate
@pytest.mark.parametrize(
    ("server", "worker", "why"),
    [
        (TOKEN, TOKEN[::-1], "does not know the token of this job"),
        (TOKEN, "", "has no token"),
        ("", TOKEN, "has no token"),
    ],
    ids=["wrong", "the worker has none", "the server has none"],
)
def test_processes_with_different_tokens_end(
    server: str, worker: str, why: str, tmp_path: Path
) -> None:
    """Started by hand: the worker ends at once, and the server says why no worker joined."""
    holder, port = reserved_port()
    common = {
        "FLEET_WORKER_NUM": "1",
        "FLEET_SERVER_NUM": "1",
        "FLEET_SERVER_ENDPOINTS": f"127.0.0.1:{port}",
        "FLEET_INDEX": "0",
        "FLEET_DEADLINE_S": "20",
    }
    with holder:
        processes = [
            start(
                [sys.executable, SCRIPT],
                {**common, "FLEET_ROLE": kind, "FLEET_TOKEN": token},
                cwd=tmp_path,
            )
            for kind, token in (("server", server), ("worker", worker))
        ]
        try:
            worker_output, _ = processes[1].communicate(timeout=100)
        finally:
            processes[0].terminate()
        server_output, _ = processes[0].communicate(timeout=60)
    assert processes[1].returncode == PERMANENT
    for text in (worker_output, server_output):
        assert why in text
        assert "(FLEET_TOKEN, or fleetrun --token_file)" in text
        assert TOKEN not in text
    assert os.path.exists(tmp_path / "server.0.json")


def machines(place: Path, tokens: tuple[str, str]) -> list[Process]:
    """A server and a worker on each of two machines, which are loopback addresses."""
    hosts = ("127.0.0.1", "127.0.0.2")
    listed = ["--ips", ",".join(hosts), "--start_port", str(free_ports(hosts, 8))]
    count = ["--server_num", "1", "--worker_num", "1", "--tee"]
    (place / "go").write_text("well")
    return [
        start(
            [str(BIN / "fleetrun"), *listed, *count, "--host", host, "--log_dir", host, SCRIPT],
            {"FLEET_TOKEN": token},
            cwd=place,
        )
        for host, token in zip(hosts, tokens, strict=True)
    ]


@pytest.mark.gate
@pytest.mark.parametrize("with_token", [True, False])
def test_machines_with_equal_tokens_or_none_train(with_token: bool, tmp_path: Path) -> None:
    token = TOKEN if with_token else ""
    codes, text = finish(machines(tmp_path, (token, token)))
    assert codes == [0, 0], text
    assert text.count("anyone who reaches the ports of this job can join it") == 2 * (
        not with_token
    )
    assert TOKEN not in text


@pytest.mark.gate
def test_machines_with_different_tokens_end_and_say_why(tmp_path: Path) -> None:
    codes, text = finish(machines(tmp_path, (TOKEN, TOKEN[::-1])))
    assert codes == [PERMANENT] * 2, text
    last = [line for line in text.splitlines() if line.startswith("fleetrun: failed:")]
    assert len(last) == 2
    assert all("does not know the token of this job" in line for line in last), last
    assert TOKEN not in text
    assert TOKEN[::-1] not in text
