# SPDX-License-Identifier: Apache-2.0
"""The container files name files, extras and commands that exist, and no image runs as root."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
LINES = [line.strip() for line in TEXT.splitlines() if line.strip() and line[0] != "#"]


def stages() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in LINES:
        if line.startswith("FROM "):
            found[line.split(" AS ")[1]] = current = [line]
        elif found:
            current.append(line)
    return found


def health(stage: str) -> str:
    (command,) = (
        line.split(" CMD ")[1] for line in stages()[stage] if line.startswith("HEALTHCHECK")
    )
    return command


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignore = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "src"}
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignore


def test_packages_need_no_other_file_than_those_copied() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^(?:readme|path) = "(.+)"|^license-files = \["(.+)"\]', text, re.MULTILINE)
    files = {one or other for one, other in named}
    assert files == {"README.md", "LICENSE", "src/fleetlight/version.py"}


def test_each_argument_of_the_build_is_used() -> None:
    names = [line.split()[1].partition("=")[0] for line in LINES if line.startswith("ARG ")]
    assert names == ["PYTHON", "TORCH", "TORCH_INDEX", "EXTRAS"]
    for name in names:
        assert re.search(rf"\$\{{{name}[:}}]", TEXT), name


def test_both_images_are_those_of_a_user_without_rights() -> None:
    parts = stages()
    assert list(parts) == ["base", "server", "worker"]  # the last is built by default
    users = [line for line in LINES if line.startswith("USER ")]
    assert users == ["USER 1000"]
    assert users[0] in parts["base"]
    for name in ("server", "worker"):
        assert parts[name][0] == f"FROM base AS {name}"
        assert shlex.split(health(name))[0] == "grep"


def test_server_is_healthy_when_a_socket_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert subprocess.run(["sh", "-c", health("server")], check=False).returncode == 0


@pytest.mark.parametrize(("state", "code"), [("S (sleeping)", 0), ("T (stopped)", 1), ("Z", 1)])
def test_worker_is_unhealthy_when_it_is_stopped(tmp_path: Path, state: str, code: int) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nState:\t{state}\n")
    command = health("worker").replace("/proc/1/status", str(status))
    assert subprocess.run(["sh", "-c", command], check=False).returncode == code
