# SPDX-License-Identifier: Apache-2.0
"""`Resuming`: all workers of a job that is started again report, and all processes decide alike."""

from __future__ import annotations

from fleetlight.ps.resume import Decision, Remains, Report, decide
from fleetlight.ps.server.attendance import Attendance


class Resuming:
    """One per server, before it knows what is trained."""

    def __init__(self, attendance: Attendance, worker_num: int) -> None:
        self._attendance = attendance
        self._news = attendance.news
        self._reports: list[Report | None] = [None] * worker_num
        #: what is in this server's folder; None where no whole job resumes
        self.remains: Remains | None = None

    def report(self, worker: int, report: Report) -> Decision:
        """A worker reports; the answer comes once all have."""
        with self._news:
            self._reports[worker] = report
            self._news.notify_all()
            return self._decided()

    def decided(self) -> Decision:
        """What all processes do, once all workers have reported."""
        with self._news:
            return self._decided()

    def _decided(self) -> Decision:
        self._attendance.wait("resuming", lambda: not self._missing(), self._missing)
        return decide([one for one in self._reports if one is not None])

    def _missing(self) -> list[int]:
        return [worker for worker, report in enumerate(self._reports) if report is None]
