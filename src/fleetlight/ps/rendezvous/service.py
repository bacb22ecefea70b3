# SPDX-License-Identifier: Apache-2.0
"""`RendezvousService`: replies to the members of a job that look for each other."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from fleetlight.errors import MembershipError, PeerError, PeerLostError, ProtocolError, counted
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.directory import Directory, OccupiedError
from fleetlight.ps.rendezvous.enrolment import Enrolment, SurplusError
from fleetlight.ps.transport.interface import Connection, Handler, Reply
from fleetlight.ps.transport.protocol import Array
from fleetlight.roles.members import MemberHello, check_reachable
from fleetlight.roles.role import Kind

#: how often a wait reports, and looks at its deadline
_REPORT_EVERY_S, _LOOK_S = 3.0, 0.25
#: how long a process may wait for the end of an older one of the same index
OCCUPIED_S = 7.0
#: how long all servers of a job may be silent
DESERTED_S = 60.0


@dataclasses.dataclass(frozen=True)
class JobSize:
    """What all members of a job must agree on."""

    version: str
    #: the id of the job; "" without one
    job: str
    worker_num: int
    server_num: int


@dataclasses.dataclass(frozen=True)
class _Attendee:
    """The member at the other end of a connection."""

    process: str
    hello: MemberHello


class RendezvousService:
    """Members call it before they know each other; servers call it as long as they run.

    The first failure that a member reports is the reply to all later requests.
    """

    def __init__(
        self, size: JobSize, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._size, self._deadline_s, self._clock = size, deadline_s, clock
        self._changed = threading.Condition()
        self._directory = Directory(size.server_num)
        self._enrolments = {
            Kind.WORKER.value: Enrolment("worker", size.worker_num),
            Kind.SERVER.value: Enrolment("server", size.server_num),
        }
        self._connected: set[Connection] = set()
        #: True once a member knows the job from an earlier process of the rendezvous
        self._is_known_job = False
        #: why the job fails
        self.failure = ""

    def __call__(
        self, connection: Connection, message: m.Message, arrays: Sequence[Array]
    ) -> Reply:
        """Handle the request of a member."""
        if isinstance(message, m.Attend):
            return self._attend(connection, message)
        if isinstance(message, m.PlaceRequest):
            with self._changed:
                return m.Located(self._directory.entries()), []
        attendee = connection.note
        if not isinstance(attendee, _Attendee):
            raise ProtocolError(
                f"{connection.peer} sent {type(message).__name__} first, expected Attend"
            )
        with self._changed:
            if self.failure and not isinstance(message, m.Depart):
                raise MembershipError(self.failure)
            return self._handle(connection, attendee, message), []

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        with self._changed:
            self._lose(connection)

    def _lose_ended(self) -> None:
        """Lose processes that died while they waited: the transport reports that late."""
        for connection in [one for one in self._connected if one.has_ended()]:
            self._lose(connection)

    def _lose(self, connection: Connection) -> None:
        attendee = connection.note
        if not isinstance(attendee, _Attendee) or connection not in self._connected:
            return
        self._connected.discard(connection)
        self._enrolments[attendee.hello.kind].lose(attendee.process)
        if attendee.hello.kind == Kind.SERVER.value:
            self._directory.lose(attendee.process)
        self._changed.notify_all()

    def fail(self, why: str) -> None:
        """End the job for all members that call from now on."""
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()

    @property
    def has_formed(self) -> bool:
        """True once all members have arrived, here or at an earlier process of the rendezvous."""
        with self._changed:
            return self._is_known_job or not self._missing_text()

    def fail_incomplete(self) -> None:
        """End the job because members are missing at the deadline."""
        with self._changed:
            self.failure = self.failure or self._missing_text()
            self._changed.notify_all()

    def fail_deserted(self) -> None:
        """End the job if all its servers have been silent for long."""
        with self._changed:
            silent_s = self._directory.silent_s(self._clock())
            if silent_s > DESERTED_S:
                self.failure = self.failure or (
                    f"no server has announced itself for {silent_s:.0f} s; read their logs"
                )
                self._changed.notify_all()

    def size_text(self) -> str:
        """The members of the job, counted."""
        workers = counted(self._size.worker_num, "worker")
        return f"{workers} and {counted(self._size.server_num, 'server')}"

    def wait_for_departures(self, within_s: float) -> None:
        """Wait until no member is connected any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connected, within_s)

    def wait_for_end(self, within_s: float) -> bool:
        """Wait until all servers have left, or the job fails; False after the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self.failure) or self._directory.is_over, within_s
            )

    def _attend(self, connection: Connection, message: m.Attend) -> Reply:
        self._check_fits(message)
        with self._changed:
            connection.note = _Attendee(message.process, message.hello)
            connection.peer = f"{message.hello.kind} of {message.hello.where()}"
            self._connected.add(connection)
            if not self.failure and not message.joins:
                self._arrive(connection, message)
        return m.Done(), []

    def _arrive(self, connection: Connection, message: m.Attend) -> None:
        hello = message.hello
        enrolment = self._enrolments[hello.kind]
        until = self._clock() + OCCUPIED_S

        def arrived() -> bool:
            is_server = hello.kind == Kind.SERVER.value
            vacant = self._directory.vacant(self._clock()) if is_server else []
            try:
                enrolment.arrive(message.process, hello, vacant)
            except SurplusError:
                return False
            return True

        self._lose_ended()

        while not arrived():
            if hello.kind == Kind.WORKER.value or self._clock() >= until:
                raise MembershipError(enrolment.surplus_text())
            self._pause(connection)
        self._changed.notify_all()
        self._check_reachable()

    def _check_fits(self, message: m.Attend) -> None:
        hello, size = message.hello, self._size
        if hello.kind not in self._enrolments:
            raise MembershipError(f"a {hello.kind} is no member of a job, only workers and servers")
        theirs = JobSize(hello.fleetlight, message.job, message.worker_num, message.server_num)
        for fact in ("version", "worker_num", "server_num"):
            if getattr(theirs, fact) != getattr(size, fact):
                raise MembershipError(
                    f"the {hello.kind} of {hello.where()} has {fact}={getattr(theirs, fact)}, but "
                    f"this job has {fact}={getattr(size, fact)}; give all processes of the job the "
                    "same version and counts"
                )
        if theirs.job and size.job and theirs.job != size.job:
            raise MembershipError(
                f"the {hello.kind} of {hello.where()} belongs to job {theirs.job}, but the "
                f"rendezvous is that of job {size.job}; give each job one of its own"
            )

    def _handle(self, connection: Connection, attendee: _Attendee, message: m.Message) -> m.Message:
        match message:
            case m.Enrol():
                return self._enrol(connection, attendee)
            case m.Announce():
                return self._announce(connection, attendee, message)
            case m.Locate():
                return self._locate(connection, message)
            case m.Depart():
                return self._depart(attendee, message)
        raise ProtocolError(f"the rendezvous has no reply to {type(message).__name__}")

    def _enrol(self, connection: Connection, attendee: _Attendee) -> m.Enrolled:
        enrolment = self._enrolments[attendee.hello.kind]
        self._wait(
            connection,
            lambda: enrolment.is_complete,
            enrolment.progress,
            lambda: enrolment.missing_text(self._deadline_s),
        )
        return enrolment.answer(attendee.process)

    def _check_reachable(self) -> None:
        """Fail where the servers listen only for their own machine and workers may be on others."""
        servers, workers = (self._enrolments[kind.value] for kind in (Kind.SERVER, Kind.WORKER))
        if servers.is_complete and workers.is_complete:
            try:
                check_reachable(servers.members, workers.members)
            except MembershipError as error:
                self.fail(str(error))
                raise

    def _announce(
        self, connection: Connection, attendee: _Attendee, message: m.Announce
    ) -> m.Announced:
        self._is_known_job = self._is_known_job or bool(message.incarnation)
        until = self._clock() + OCCUPIED_S
        while True:
            try:
                incarnation = self._directory.announce(attendee.process, message, self._clock())
            except OccupiedError:
                if self._clock() >= until:
                    text = self._directory.occupied_text(message, self._clock())
                    raise MembershipError(text) from None
                self._pause(connection)
                continue
            self._changed.notify_all()
            return m.Announced(incarnation)

    def _locate(self, connection: Connection, message: m.Locate) -> m.Located:
        self._is_known_job = self._is_known_job or bool(message.known)
        self._directory.learn(message.known)
        directory = self._directory
        if not message.waits:
            return m.Located(directory.entries())
        self._wait(
            connection,
            lambda: not directory.missing(),
            lambda: f"servers {directory.missing()} have not announced themselves",
            self._missing_servers_text,
        )
        return m.Located(directory.entries())

    def _missing_text(self) -> str:
        """The members that are missing; "" if all are here."""
        for enrolment in self._enrolments.values():
            if not enrolment.is_complete:
                return enrolment.missing_text(self._deadline_s)
        return self._missing_servers_text() if self._directory.missing() else ""

    def _missing_servers_text(self) -> str:
        """The servers that are missing, or have not announced where they listen."""
        enrolment = self._enrolments[Kind.SERVER.value]
        if not enrolment.is_complete:
            return enrolment.missing_text(self._deadline_s)
        servers = ", ".join(f"server {index}" for index in self._directory.missing())
        return (
            f"not announced within {self._deadline_s:g} s where they listen: {servers}; did they "
            "all start, with the same rendezvous?"
        )

    def _depart(self, attendee: _Attendee, message: m.Depart) -> m.Done:
        kind = attendee.hello.kind
        if not self._is_current(attendee, message.index):
            # another process has replaced this one: its end is not that of the member
            return m.Done()
        if message.error:
            self.failure = self.failure or f"{kind} {message.index} failed: {message.error}"
        elif kind == Kind.SERVER.value:
            self._directory.depart(message.index)
        self._changed.notify_all()
        return m.Done()

    def _is_current(self, attendee: _Attendee, index: int) -> bool:
        """False for a process of which the job has a newer one."""
        if attendee.hello.kind == Kind.SERVER.value:
            current = self._directory.process_of(index)
        else:
            current = self._enrolments[attendee.hello.kind].process_of(index)
        return current in (None, attendee.process)

    def _pause(self, connection: Connection) -> None:
        """Wait a moment with `changed` held; raise if the caller has gone."""
        self._changed.wait(_LOOK_S)
        if connection.has_ended():
            # the transport reports the end of a connection only after this request
            self._lose(connection)
            raise PeerLostError("the rendezvous ends, or the caller closed its connection")

    def _wait(
        self,
        connection: Connection,
        condition: Callable[[], bool],
        progress: Callable[[], str],
        expired: Callable[[], str],
    ) -> None:
        """Wait with `changed` held; at the deadline, the text of `expired` fails the job."""
        start = report_at = self._clock()
        while not condition():
            now = self._clock()
            if now - start >= self._deadline_s:
                self.failure = self.failure or expired()
                self._changed.notify_all()
            if self.failure:
                raise MembershipError(self.failure)
            if now - report_at >= _REPORT_EVERY_S:
                logger.warning("%s", progress())
                report_at = now
            self._pause(connection)


class WithRendezvous:
    """A server that keeps the rendezvous, too: members call it at the same address."""

    def __init__(self, server: Handler, service: RendezvousService) -> None:
        self._server, self._service = server, service

    def __call__(
        self, connection: Connection, message: m.Message, arrays: Sequence[Array]
    ) -> Reply:
        """Handle a request."""
        return self._handler_of(connection, message)(connection, message, arrays)

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        self._handler_of(connection).gone(connection, error)

    def _handler_of(self, connection: Connection, message: m.Message | None = None) -> Handler:
        meets = isinstance(message, m.Attend) or isinstance(connection.note, _Attendee)
        return self._service if meets else self._server
