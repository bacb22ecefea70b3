# SPDX-License-Identifier: Apache-2.0
"""The engine of docs/porting.md runs a job, and ends it at a permanent error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN
from tests.workers import reserved_port

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "porting.md"
FAILING = """
import fleetlight as fleet
fleet.init()
fleet.DistributedStrategy(durability="logs")
"""


def run_engine(folder: Path, *script: str, flags: str = "") -> tuple[int, str]:
    """The exit code and the output of the page's program, with flags of `fleetlight member`."""
    folder.mkdir()
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert '"member", "--"' in program
    (folder / "engine.py").write_text(program.replace('"member", ', f'"member", {flags}'))
    without = {name: text for name, text in os.environ.items() if not name.startswith("FLEET_")}
    holder, port = reserved_port()
    env = {**without, "MASTER": f"127.0.0.1:{port}", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with holder:
        ran = subprocess.run(
            [sys.executable, "engine.py", *script],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
            check=False,
        )
    return ran.returncode, ran.stdout


def test_engine_restarts_a_killed_server(tmp_path: Path) -> None:
    script = str(HERE / "outlive.py")
    code, text = run_engine(tmp_path / "killed", script, "--kill", "3")
    assert code == 0, text
    assert "server 1 of 2 was killed by SIGKILL" in text
    assert "incarnation 2 of this server: recovered" in text
    assert len(re.findall(r"^fleetlight: done: ", text, re.MULTILINE)) == 4
    code, here = run_engine(tmp_path / "here", script, "--kill", "3", flags='"--restarts", "1", ')
    assert code == 0, here
    assert "restarting it (restart 1, 0 left), the others continue" in here
    assert "fleetlight: failed" not in here
    code, quiet = run_engine(tmp_path / "quiet", script)
    assert code == 0, quiet
    learnt = [set(re.findall(r"LEARNT (\w+)", one)) for one in (text, here, quiet)]
    assert learnt[0] == learnt[1] == learnt[2]
    assert len(learnt[0]) == 1


def test_engine_stops_at_a_permanent_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    code, text = run_engine(tmp_path / "failing", str(tmp_path / "train.py"))
    assert code == 78, text
    assert re.search(r"failed: \w+ \d of 2 exited with code 78 after .*: StrategyError: ", text)
    # each was started once
    assert len(re.findall(r"^fleetlight: ", text, re.MULTILINE)) == 4, text
