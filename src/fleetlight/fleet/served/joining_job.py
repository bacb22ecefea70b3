# SPDX-License-Identifier: Apache-2.0
"""`JoiningJob`: a worker that joins while the job runs.

The script runs from its beginning. Until its first loop, barriers have the results that the other
workers got there. At that loop the worker waits for the start of a turn, takes the state of worker
0, and takes part from then on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import NoReplay
from fleetlight.fleet.recording.process_metrics import note
from fleetlight.fleet.served.elastic.join_state import JoinState
from fleetlight.fleet.served.job import CatchingUpJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.observe.log import logger
from fleetlight.ps.worker.joining import RunningJob
from fleetlight.ps.worker.served_group import ServedGroup


class JobEnded(SystemExit):
    """The job ended before this worker could join."""

    def __init__(self) -> None:
        super().__init__(0)


class JoiningReplay(NoReplay):
    """Where the script of a worker that joins takes part."""

    is_catching_up = True
    joins = True

    def __init__(self) -> None:
        self._job: Job | None = None
        #: the state of worker 0, once this worker is admitted
        self._state: JoinState | None = None

    def attach(self, job: Job, session: ServerSession, group: ServedGroup) -> None:
        """The job of this worker."""
        self._job, self._session, self._group = job, session, group

    def position_of(  # type: ignore[override]
        self, loader: int
    ) -> Mapping[str, Any] | None:
        """The position of a loader that the script makes after this worker has joined."""
        positions = () if self._state is None else self._state.positions
        return positions[loader] if loader < len(positions) else None

    def epoch_asked(self, loader: int) -> None:
        """The script asks for the epoch of a loader: it is about to iterate over it."""
        self._admit(loader)

    def loop_begins(self, loader: int) -> None:
        """Take part from now on."""
        if not self.is_catching_up:
            return
        self._admit(loader)
        job, state = self._job, self._state
        assert job is not None
        assert state is not None
        job.loaders[loader].cursor.check_asked()
        state.restore(job, self._session)
        self.is_catching_up = False
        self._group.prelude = None
        replies = self._session.client.replies
        replies.go_on(replies.made, state.meetings)
        note(job.role, "join", f"joined at step {job.step}", job.step)
        logger.warning(
            "joined at step %d, in epoch %d; learning rates are those of worker 0",
            job.step,
            job.loaders[loader].epoch,
        )

    def _admit(self, loader: int) -> None:
        """Wait for the start of a turn, and take part on all servers; once."""
        if self._state is not None:
            return
        job, session = self._job, self._session
        assert job is not None
        job.open()
        running = RunningJob(session.client)
        while True:
            admission = running.admitted(loader)
            if admission is None:
                logger.warning("the job has ended before this worker could join")
                raise JobEnded
            state = JoinState.from_bytes(admission.state)
            state.check(job, session)
            if running.enter(admission, state.phase):
                break
        for number, one in enumerate(job.loaders):
            # the script must read the epoch of the loop that it begins now
            one.cursor.resume(state.positions[number], must_be_asked=number == loader)
        session.client.epoch = state.epoch
        session.communicator.enter(state.phase)
        running.begin()
        self._state = state


@dataclasses.dataclass(kw_only=True)
class JoiningJob(CatchingUpJob):
    """Until its first loop, the script repeats what the other workers did before theirs."""

    replay: JoiningReplay = dataclasses.field(default_factory=JoiningReplay)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay.attach(self, self.session, self._peers)
