# SPDX-License-Identifier: Apache-2.0
"""The small tools of the fleetlight command."""

import subprocess
import sys
import time
import types
from pathlib import Path

import msgspec
import pytest
from tests.launch.doctor.doctors import HOSTS, free_ports

import fleetlight
from fleetlight.cli.fleetlight import main
from fleetlight.cli.terminal import output
from fleetlight.errors import CheckpointError
from fleetlight.observe.telemetry.recorder import ThinnedFile
from fleetlight.observe.telemetry.snapshot import FOLDER, Snapshot, snapshot_file


def test_version_lists_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["fleetlight", "torch", "python"]


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "fleetlight", "version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"fleetlight {fleetlight.__version__}\n")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def export(dirname: str, out: str) -> None:
        if dirname == "broken":
            raise CheckpointError("no manifest in broken")
        calls.append((dirname, out))

    module = types.ModuleType("fleetlight.checkpoint")
    module.export = export  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fleetlight.checkpoint", module)
    return calls


def test_export_writes_the_checkpoint_or_reports_the_error(
    exported: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "ckpt", "out.safetensors"]) == 0
    assert exported == [("ckpt", "out.safetensors")]
    assert main(["export", "broken", "out.safetensors"]) == 1
    assert "error: no manifest in broken" in capsys.readouterr().err


def test_cert_creates_and_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "certs")
    assert main(["cert", folder, "--host", "a.b", "--host", "10.0.0.9", "--days", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines[:-1]] == [
        "ca.pem",
        "server.pem",
        "server.key",
        "client.pem",
        "client.key",
    ]
    assert lines[-1].endswith(f"fleetrun --ssl {folder} ...")
    assert main(["cert", folder]) == 1
    assert "already has" in capsys.readouterr().err
    assert main(["cert", folder, "--replace"]) == 0


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: fleetlight")
    assert "list the processes of a job" in shown


def test_flag_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fleetlight {fleetlight.__version__}\n"


def test_doctor_checks_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nproc", "1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("name ")
    assert lines[-1] == "fit"


def test_the_doctor_refuses_a_list_without_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ips", "192.0.2.7,192.0.2.8"]) == 1
    assert "error: none of 192.0.2.7, 192.0.2.8 is" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_doctors_of_two_machines_agree() -> None:
    options = ["--ips", ",".join(HOSTS[:2]), "--port", str(free_ports(3)), "--seconds", "0.1"]
    command = [sys.executable, "-m", "fleetlight.cli.fleetlight", "doctor", *options]
    running = [
        subprocess.Popen([*command, "--host", host], stdout=subprocess.PIPE, text=True)
        for host in HOSTS[:2]
    ]
    first, second = (process.communicate(timeout=60)[0].splitlines() for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert "fleetlight: measuring 127.0.0.1 -> 127.0.0.2" in first
    assert first[-1] == second[-1] == "fit"
    tables = [lines[lines.index("") :] for lines in (first, second)]
    assert tables[0] == tables[1]


@pytest.mark.multiprocess
def test_a_doctor_names_missing_machines() -> None:
    options = ["--ips", ",".join(HOSTS[:2]), "--port", str(free_ports(3)), "--deadline_s", "0.2"]
    command = [sys.executable, "-m", "fleetlight.cli.fleetlight", "doctor", *options]
    done = subprocess.run(
        [*command, "--host", HOSTS[0]], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "problem: 127.0.0.2 is absent: connection refused" in done.stdout
    assert done.stdout.endswith("not fit: 1 problem\n")


def test_a_list_without_machines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ips", ","]) == 1
    assert "--ips ',' names no machine" in capsys.readouterr().err


# -- tables of a job in its log folder


def record(folder: Path, server: int, age_s: float, rows: float) -> None:
    values = {"table_rows{users}": rows, "table_bytes{users}": rows * 2**20}
    snapshot = Snapshot(time.time() - age_s, 1, values)
    ThinnedFile(folder / FOLDER / snapshot_file("server", server)).append(
        msgspec.json.encode(snapshot)
    )


def test_rows_bytes_growth_and_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 10.0, 0)
    record(tmp_path, 0, 0.0, 30)
    record(tmp_path, 1, 40.0, 10)
    assert main(["table", "stats", str(tmp_path)]) == 0
    first, zero, one = capsys.readouterr().out.splitlines()
    assert first.startswith("table users: 40 rows, 40.0 MiB in memory, +1")
    assert zero == "  server 0: 30 rows, 30.0 MiB, 1.500 of the average"
    assert one == "  server 1: 10 rows, 10.0 MiB, 0.500 of the average, 40 s ago"


def test_lines_are_broken_in_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 0, 40.0, 1)
    assert main(["table", "stats", str(tmp_path)]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(output, "columns", lambda stream=None: 40)
    assert main(["table", "stats", str(tmp_path)]) == 0
    narrow = capsys.readouterr().out
    assert all(len(line) <= 40 for line in narrow.splitlines())
    assert narrow.split() == whole.split()
    assert len(narrow.splitlines()) > len(whole.splitlines()) == 2


def test_an_unknown_table_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 0.0, 1)
    assert main(["table", "stats", str(tmp_path), "usres"]) != 0
    assert "users" in capsys.readouterr().err


def test_a_job_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FOLDER).mkdir()
    assert main(["table", "stats", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("no tables yet\n")
