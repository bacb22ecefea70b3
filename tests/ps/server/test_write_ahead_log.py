# SPDX-License-Identifier: Apache-2.0
"""WriteAheadLog: a reply waits until every change that it may show is logged."""

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
    journal = Journal(tmp_path, CODEC, 1, Policy(sync=NEVER), lambda text: None)
    yield journal
    journal.close()


def test_a_reader_waits_for_a_change_in_progress(journal: Any) -> None:
    log = WriteAheadLog()
    log.start(journal, values=True)
    applied, may_continue = threading.Event(), threading.Event()

    def act() -> None:
        applied.set()
        assert may_continue.wait(20)

    writer = threading.Thread(target=lambda: log.apply(PhaseEnded(0, 0), [], act))
    writer.start()
    assert applied.wait(20)
    # a reader may see the change from now on
    sizes: list[int] = []
    reader = threading.Thread(target=lambda: (log.wait_on_disk(), sizes.append(journal.size)))
    reader.start()
    reader.join(0.05)
    may_continue.set()
    for thread in (writer, reader):
        thread.join(20)
    assert sizes[0] > 0


def test_without_values_no_reader_waits_for_a_change(journal: Any) -> None:
    log = WriteAheadLog()
    log.wait_on_disk()
    log.start(journal, values=False)
    log.append(PhaseEnded(0, 0))
    with log.lock:
        thread = threading.Thread(target=log.wait_on_disk)
        thread.start()
        thread.join(20)
    assert journal.size > 0


@pytest.mark.parametrize("message", [m.Pull([], True), m.FetchDense()])
def test_a_reply_waits_for_the_log_records_of_other_changes(
    tmp_path: Path, message: m.Message
) -> None:
    server = closed_server(workers=1)
    policy = Policy(sync=NEVER)
    open_up(server, plan(workers=1), Durable(tmp_path / "kept", job="a job", policy=policy))
    worker = Worker(server, 0, workers=1)
    # another thread has made a change that is not committed yet
    server._log.append(PhaseEnded(0, 0))
    assert server._durability is not None
    journal = server._durability._journal
    assert journal is not None
    before = journal.size
    worker.say(message, lane="pull")
    assert journal.size > before
    server.close()
