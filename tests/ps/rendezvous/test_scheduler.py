# SPDX-License-Identifier: Apache-2.0
"""RendezvousScheduler: what its log says of a job."""

from __future__ import annotations

import pytest
from tests.ps.rendezvous.members import LIMIT_S, VERSION, client_of, hello
from tests.workers import reserved_port

from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.scheduler import RendezvousScheduler
from fleetlight.ps.rendezvous.service import JobSize


def test_a_short_job_has_formed_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forms and ends before the scheduler looks for the first time."""
    monkeypatch.setattr(logger, "propagate", True)
    holder, port = reserved_port()
    with holder, caplog.at_level("INFO", logger.name):
        scheduler = RendezvousScheduler(("127.0.0.1", port), JobSize(VERSION, "job", 1, 1), LIMIT_S)
        point = scheduler._point
        server = client_of(point, "s", hello("server", 0)).channel(LIMIT_S)
        server.call(m.Announce(0, 0, "10.0.0.1", 7000))
        client_of(point, "w").enrol()
        server.call(m.Depart(0))
        assert scheduler.run() == 0
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2:] == ["cluster formed: 1 worker and 1 server", "all servers have left"]
