# SPDX-License-Identifier: Apache-2.0
"""The serving example: one command trains and publishes, another returns scores."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from tests.examples.running import EXAMPLES, ended, start
from tests.workers import reserved_port

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

TRAIN = ["--every_s", "0.5", "--samples", "20000", "--epochs", "2", "--out", "shared"]
RECORD = {"numbers": [[0.5] * 13], "ids": [list(range(26))]}


def asked(url: str, body: Any = None) -> Any:
    """The reply, once the service listens."""
    data = None if body is None else json.dumps(body).encode()
    until = time.monotonic() + 100
    while True:
        try:
            with urllib.request.urlopen(url, data, timeout=20) as reply:
                return json.load(reply)
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_scores_are_of_the_newest_publication() -> None:
    # the service listens only after the first publication, and others take free ports meanwhile
    holder, port = reserved_port()
    fleetrun = [sys.executable, "-m", "fleetlight.launch", "--server_num", "1"]
    # the service waits for the first publication
    serving = start(
        sys.executable, EXAMPLES / "serving/serve.py", "--out", "shared", "--port", port
    )
    training = start(*fleetrun, "--worker_num", "2", EXAMPLES / "serving/train.py", *TRAIN)
    try:
        first = asked(f"http://127.0.0.1:{port}/score", RECORD)
        assert 0 < first["scores"][0] < 1
        output = ended(training)
        health: Any = {"step": -1}
        steps = 2 * -(-20000 // 512)
        while health["step"] < steps:
            health = asked(f"http://127.0.0.1:{port}/health")
        assert health["error"] == ""
        last = asked(f"http://127.0.0.1:{port}/score", RECORD)
        assert last["publication"] >= first["publication"]
        assert last["scores"] != first["scores"] or last["publication"] == first["publication"]
        assert "fleetrun: done" in output
    finally:
        serving.kill()
        serving.communicate()
        holder.close()
