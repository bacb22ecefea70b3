# SPDX-License-Identifier: Apache-2.0
"""TorchX runs a job with servers by its local scheduler."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import finish, results, start
from tests.workers import reserved_port

from fleetlight.errors import ConfigError

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("torchx") is None, reason="TorchX is not installed (torchx)"
    ),
]

SERVE = str(Path(__file__).parent.parent / "multiprocess" / "serve.py")


def test_a_job_with_servers_equals_one_process(tmp_path: Path) -> None:
    import fleetlight.torchx

    codes, text = finish([start([sys.executable, SERVE])])
    assert codes == [0], text
    expected = results(text)
    holder, port = reserved_port()
    with holder:
        free = port
    command = [
        *(sys.executable, "-m", "torchx.cli.main", "run", "--wait", "-s", "local_cwd"),
        *("-cfg", f"log_dir={tmp_path / 'log'}", f"{fleetlight.torchx.__file__}:job"),
        *("--script", SERVE, "--worker_num", "2", "--server_num", "2", "--port", str(free)),
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    [code], text = finish([start(command, {"PATH": path}, cwd=tmp_path)])
    logs = "\n".join(file.read_text() for file in (tmp_path / "log").rglob("stdout.log"))
    assert code == 0, text + logs
    assert results(logs) == pytest.approx(expected * 2, rel=1e-5)


def test_the_component_has_a_role_for_servers() -> None:
    from fleetlight.torchx import job

    app = job("--lr", "3", script="train.py", worker_num=4, server_num=2, worker_gpu=1)
    assert [(role.name, role.num_replicas) for role in app.roles] == [("server", 2), ("worker", 4)]
    assert app.roles[1].args[-3:] == ["train.py", "--lr", "3"]
    assert app.roles[1].env["FLEET_DEVICE"] == "0"
    assert app.roles[0].env["FLEET_TOKEN"] == app.roles[1].env["FLEET_TOKEN"]
    with pytest.raises(ConfigError, match="either --script"):
        job(worker_num=4)
