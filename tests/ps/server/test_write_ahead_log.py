# SPDX-License-Identifier: Apache-2.0
"""What may be told: changes that are written down, and nothing of one that is only made."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ps.serving import Worker, closed_server, open_up, plan

from fleetlight.ps import messages as m
from fleetlight.ps.changes import PhaseEnded
from fleetlight.ps.journal.journal import NEVER, Journal, Policy
from fleetlight.ps.server.durability.durability import CODEC, Durable
from fleetlight.ps.server.write_ahead_log import WriteAheadLog


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    one = Journal(tmp_path, CODEC, 1, Policy(sync=NEVER), lambda text: None)
    yield one
    one.close()


def test_a_change_that_is_being_made_is_waited_for(journal: Any) -> None:
    log = WriteAheadLog()
    log.start(journal, values=True)
    is_made, may_go_on = threading.Event(), threading.Event()

    def act() -> None:
        is_made.set()
        assert may_go_on.wait(20)

    maker = threading.Thread(target=lambda: log.apply(PhaseEnded(0, 0), [], act))
    maker.start()
    assert is_made.wait(20)
    # whoever reads now may see it
    sizes: list[int] = []
    reader = threading.Thread(target=lambda: (log.wait_on_disk(), sizes.append(journal.size)))
    reader.start()
    reader.join(0.05)
    may_go_on.set()
    for thread in (maker, reader):
        thread.join(20)
    assert sizes[0] > 0


def test_without_values_nobody_waits_for_a_change(journal: Any) -> None:
    log = WriteAheadLog()
    log.wait_on_disk()
    log.start(journal, values=False)
    log.append(PhaseEnded(0, 0))
    with log.lock:
        thread = threading.Thread(target=log.wait_on_disk)
        thread.start()
        thread.join(20)
    assert journal.size > 0


@pytest.mark.parametrize("tells", [m.Pull([], True), m.FetchDense()])
def test_what_is_told_is_written_down_whoever_made_it(tmp_path: Path, tells: m.Message) -> None:
    server = closed_server(workers=1)
    policy = Policy(sync=NEVER)
    open_up(server, plan(workers=1), Durable(tmp_path / "kept", job="a job", policy=policy))
    worker = Worker(server, 0, workers=1)
    # somebody has made a change, and its commit is still to come
    server._log.append(PhaseEnded(0, 0))
    assert server._durability is not None
    journal = server._durability._journal
    assert journal is not None
    before = journal.size
    worker.say(tells, lane="pull")
    assert journal.size > before
    server.close()
