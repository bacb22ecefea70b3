# SPDX-License-Identifier: Apache-2.0
"""The page of a real job: its metrics, a worker that is killed, and the end of the job."""

import contextlib
import http.client
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.dashboard.clients import messages
from tests.launch.conftest import place
from tests.launch.workplace import DEADLINE_S, Workplace, is_running

__all__ = ["place"]

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = """
    import os, time, torch
    import fleetlight as fleet
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.log(loss=loss)
"""

PROGRAM = """
    import torch
    import fleetlight as fleet
    from fleetlight import static
    fleet.init()
    model = fleet.distributed_model(
        torch.nn.Sequential(fleet.nn.SparseEmbedding(4, table="users"), torch.nn.Linear(4, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    feed = {"ids": torch.arange(8), "y": torch.ones(8, 1)}
    program = static.capture(model, torch.nn.functional.mse_loss, optimizer, feed)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        while True:
            static.Executor().run(program, feed, ["loss"])
"""


class Page:
    """A client of the page that a link of fleetrun names."""

    def __init__(self, link: str) -> None:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", link)
        assert found is not None, link
        self.port, self.token = int(found[1]), found[2]

    @contextlib.contextmanager
    def reply(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            yield connection.getresponse()
        finally:
            connection.close()


def _by_name(message: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in message[1]["processes"]}


def _has_steps(rows: dict[str, dict[str, Any]]) -> bool:
    return all(rows.get(f"worker {n}", {}).get("step") for n in (0, 1))


def test_a_kill_shows_on_the_page(place: Workplace) -> None:
    job = place.start("--dashboard", "--nproc_per_node", "2", place.script(SCRIPT))
    job.wait_for_line("page: ")
    link = re.search(r"page: (\S+)", job.printed)
    assert link is not None
    page = Page(link[1])
    with page.reply("/feed") as reply:
        feed = messages(reply)
        running = next(rows for rows in map(_by_name, feed) if _has_steps(rows))
        assert {row["state"] for row in running.values()} == {"running"}
        assert (place.path / "log" / "dashboard.token").stat().st_mode & 0o077 == 0

        killed = time.monotonic()
        os.kill(running["worker 1"]["pid"], signal.SIGKILL)
        rest = itertools.dropwhile(
            lambda one: _by_name(one)["worker 1"]["state"] == "running", feed
        )
        dead = _by_name(shown := next(rest))["worker 1"]
        print(f"the kill shows after {time.monotonic() - killed:.2f} s")
        assert (dead["state"], dead["detail"]) == ("failed", "killed by SIGKILL")
        # the last message says how the job has ended
        *_, (_, last) = itertools.chain([shown], rest)
        assert (last["over"], last["code"]) == (True, 128 + signal.SIGKILL)

    # the page ends with fleetrun
    code, printed = job.end()
    assert code == 128 + signal.SIGKILL, printed
    assert link[1] in job.printed
    with pytest.raises(ConnectionRefusedError), page.reply("/logs"):
        pass
    assert not (place.path / "log" / "dashboard.token").exists()
    assert (place.path / "log" / "dashboard.log").read_text() == ""


def test_the_page_shows_the_program_that_trains(place: Workplace) -> None:
    sizes = ("--server_num", "1", "--worker_num", "2")
    job = place.start("--dashboard", *sizes, place.script(PROGRAM))
    job.wait_for_line("page: ")
    link = re.search(r"page: (\S+)", job.printed)
    assert link is not None
    page = Page(link[1])
    with page.reply("/feed") as reply:
        # the picture comes with the first run
        next(said for _, said in messages(reply) if said.get("description", {}).get("picture"))
    with page.reply("/program.svg") as reply:
        assert (reply.status, reply.headers["content-type"]) == (200, "image/svg+xml")
        words = "".join(ElementTree.fromstring(reply.read()).itertext())
    assert "Training step of Sequential" in words
    assert "pull users" in words
    job.process.send_signal(signal.SIGINT)
    code, printed = job.end()
    assert code == 130, printed


def test_the_page_ends_with_a_launcher_that_is_killed(place: Workplace) -> None:
    script = place.script("import time\nwhile True: time.sleep(1)")
    job = place.start("--dashboard", "--nproc_per_node", "1", script)
    job.wait_for_line("page: ")
    link = re.search(r"page: (\S+)", job.printed)
    assert link is not None
    with Page(link[1]).reply("/logs") as reply:
        assert reply.status == 200
    [pid] = _children_that_serve(job.process.pid)
    job.process.kill()
    job.end()
    deadline = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _children_that_serve(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed if b"dashboard" in Path(f"/proc/{pid}/cmdline").read_bytes()]
