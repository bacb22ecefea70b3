# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes the page while a server dies: of a simulated job, and of a real one."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.dashboard.clients import DEADLINE_S, TOKEN, serving
from tests.dashboard.simulated import SimulatedJob
from tests.launch.conftest import place
from tests.launch.workplace import Workplace
from tests.multiprocess.test_dashboard import PROGRAM

from fleetlight.launch.processes.record import read_records

__all__ = ["place"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus"),
]

CONFIG = """
global: {{scrape_interval: 500ms}}
scrape_configs:
  - job_name: training
    scrape_timeout: 500ms
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, text: str) -> dict[tuple[str, str], float]:
        """The newest values of a query, by role and index; empty before the server is ready."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE_S)
        try:
            with contextlib.suppress(ConnectionError, ValueError):
                connection.request("GET", f"/api/v1/query?query={quote(text)}")
                found = json.loads(connection.getresponse().read())["data"]["result"]
                return {
                    (one["metric"].get("role", ""), one["metric"].get("index", "")): float(
                        one["value"][1]
                    )
                    for one in found
                }
            return {}
        finally:
            connection.close()

    def wait_for(
        self, text: str, expected: dict[tuple[str, str], float], within_s: float = DEADLINE_S
    ) -> None:
        """Wait until a query has these values."""
        deadline = time.monotonic() + within_s
        while (found := self.query(text)) != expected:
            assert time.monotonic() < deadline, f"{text}: {found}, expected {expected}"
            time.sleep(0.05)


@contextlib.contextmanager
def _scraping(folder: Path, port: int, token: str = TOKEN) -> Iterator[Prometheus]:
    (folder / "token").write_text(token)
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(token=folder / "token", port=port))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        own = sock.getsockname()[1]
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log
        )
    try:
        yield Prometheus(own)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_prometheus_follows_a_job(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path / "log", workers=1, servers=2)
    job.launcher()
    job.run(5)
    running = {("server", "0"): 1.0, ("server", "1"): 1.0, ("worker", "0"): 1.0}
    with serving(job) as site, _scraping(tmp_path, site.port) as prometheus:
        prometheus.wait_for("fleetlight_up", running)
        rows = {("server", "0"): 1_000_500.0, ("server", "1"): 1_000_500.0}
        prometheus.wait_for('fleetlight_table_rows{table="users"}', rows)
        job.statuses["server 1"] = -9
        job.launcher()
        prometheus.wait_for("fleetlight_up", {**running, ("server", "1"): 0.0})
        # its metrics are stale at once
        prometheus.wait_for('fleetlight_table_rows{table="users"}', {("server", "0"): 1_000_500.0})


#: a restarted process trains once Prometheus has seen that it did not
HELD = """
    import os, pathlib, time
    while os.environ["FLEET_RESTART"] == "1" and not pathlib.Path("seen").exists():
        time.sleep(0.05)
"""


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_prometheus_follows_a_real_job_whose_server_is_killed(place: Workplace) -> None:
    sizes = ("--server_num", "2", "--worker_num", "1", "--max_restarts", "1")
    job = place.start("--dashboard", *sizes, place.script(HELD + PROGRAM))
    job.wait_for_line("page: ")
    link = re.search(r"page: http://127\.0\.0\.1:(\d+)/\?token=(\S+)", job.printed)
    assert link is not None
    server = '{role="server", index="1"}'
    one = {("server", "1"): 1.0}
    with _scraping(place.path, int(link[1]), link[2]) as prometheus:
        prometheus.wait_for(f"fleetlight_up{server}", one, 60)
        prometheus.wait_for("fleetlight_steps_total > bool 0", {("worker", "0"): 1.0}, 60)
        [(record, _)] = read_records(place.path / "log")
        [pid] = [entry.pid for entry in record.processes if entry.name == "server 1"]
        os.kill(pid, signal.SIGKILL)
        prometheus.wait_for(f"fleetlight_up{server}", {("server", "1"): 0.0}, 60)
        (place.path / "seen").touch()
        prometheus.wait_for(f"fleetlight_restarts_total{server}", one, 60)
        prometheus.wait_for(f"fleetlight_up{server}", one, 60)
        # all processes have started again, and train
        prometheus.wait_for("fleetlight_steps_total > bool 0", {("worker", "0"): 1.0}, 60)
    job.process.send_signal(signal.SIGINT)
    code, printed = job.end()
    assert code == 130, printed
