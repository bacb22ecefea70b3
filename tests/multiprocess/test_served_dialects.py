# SPDX-License-Identifier: Apache-2.0
"""One script for parameter servers under several launchers: the same rows and parameters.

It registers the optimizer before the model and ends without `fleet.stop_worker`.
"""

import sys
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, results, start
from tests.workers import reserved_port

from fleetlight.security.certificates import make

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("serve.py"))


@pytest.fixture(scope="module")
def expected() -> float:
    codes, text = finish([start([sys.executable, SCRIPT])])
    assert codes == [0], text
    [total] = results(text)
    return total


def check(codes: list[int], text: str, expected: float) -> None:
    """All processes exited with code 0, and two workers have the values of one process."""
    assert set(codes) == {0}, text
    assert results(text) == pytest.approx([expected] * 2, rel=1e-5)
    assert "done: steps 24" in text, "no worker left the servers at the end of the script"


@pytest.mark.long
def test_encrypted_by_fleetrun(expected: float, tmp_path: Path) -> None:
    make(tmp_path / "certs")
    counts = ["--server_num", "1", "--worker_num", "2"]
    command = [str(BIN / "fleetrun"), "--ssl", "certs", *counts, "--tee", SCRIPT]
    codes, text = finish([start(command, cwd=tmp_path)])
    check(codes, text, expected)
    assert "servers ended by themselves" in text
    assert "accepts only clients with a certificate" in text


@pytest.mark.long
def test_variables_of_the_paddle_operator(expected: float) -> None:
    holder, port = reserved_port()
    common = {"PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{port}", "PADDLE_TRAINERS_NUM": "2"}
    server = {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(port)}
    workers = [{"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(i)} for i in range(2)]
    each = [common | mine for mine in (server, *workers)]
    with holder:
        check(*finish([start([sys.executable, SCRIPT], env) for env in each]), expected)
