# SPDX-License-Identifier: Apache-2.0
"""A process that only keeps the rendezvous of a job with parameter servers."""

from __future__ import annotations

import time

from fleetlight.observe.log import logger
from fleetlight.ps.rendezvous.service import JobSize, RendezvousService
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.transport.session import ConnectionLimits
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.roles.secret import Secret
from fleetlight.security.context import Contexts
from fleetlight.wire.listening import listen_at

#: how often the scheduler looks whether the job has formed
_LOOK_S = 1.0
#: how long it stays after a failure, so that the members get the reason
_LAST_REPLIES_S = 5.0


class RendezvousScheduler:
    """Serves the rendezvous until all servers have left, or the job fails."""

    def __init__(
        self,
        endpoint: Endpoint,
        size: JobSize,
        deadline_s: float,
        *,
        tls: Contexts | None = None,
        token: Secret | None = None,
    ) -> None:
        self._size, self._deadline_s = size, deadline_s
        self._point = RendezvousService(size, deadline_s=deadline_s)
        held, _ = listen_at(endpoint)
        held.setblocking(False)
        # each worker and each lane of a server may call at the same time
        connections = max(ConnectionLimits.connections, 2 * (size.worker_num + size.server_num))
        self._listener = Listener(
            endpoint,
            self._point,
            tls=None if tls is None else tls.as_server,
            token=token,
            limits=ConnectionLimits(silence_s=deadline_s, connections=connections),
            name="scheduler",
            held=held,
        )
        logger.info("the job meets at %s", endpoint_text(self._listener.address))

    def stop(self) -> None:
        """End `run` from another thread."""
        self._point.fail("the job has ended")

    def run(self) -> int:
        """Serve until the job ends; returns the exit code."""
        try:
            return self._run()
        finally:
            self._listener.stop()

    def _run(self) -> int:
        start = time.monotonic()
        has_formed = False
        while True:
            has_ended = self._point.wait_for_end(_LOOK_S)
            if not has_formed and self._point.has_formed:
                # also in a job that has ended by now
                has_formed = True
                logger.info("cluster formed: %s", self._point.size_text())
            if has_ended:
                break
            if not has_formed and time.monotonic() - start > self._deadline_s:
                self._point.fail_incomplete()
            self._point.fail_deserted()
        if not self._point.failure:
            logger.info("all servers have left")
            return 0
        logger.error("%s", self._point.failure)
        self._point.wait_for_departures(_LAST_REPLIES_S)
        return 1
