# SPDX-License-Identifier: Apache-2.0
"""The examination of several machines: the first doctor leads, the others serve its requests."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from fleetlight.errors import FleetError, LaunchError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.facts import PortListeners
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    ExamOptions,
    Facts,
    Finish,
    GetFacts,
    GetTime,
    Link,
    Measure,
    Receive,
    Refused,
    Reply,
    Request,
    Time,
)
from fleetlight.launch.processes import ports
from fleetlight.roles.role import endpoint_text
from fleetlight.roles.secret import Secret

#: most connections at a time; the doctors need one
_MAX_CONNECTIONS = 16
#: how long a connection may be idle
_SILENT_S = 30.0
_ACCEPT_S = 0.2


class DoctorService:
    """Serves the machines of the list until closed; only the first may request measurements."""

    def __init__(
        self,
        listener: socket.socket,
        asked: ExamOptions,
        number: int,
        facts: Facts,
        token: Secret | None = None,
    ) -> None:
        self._token = token
        self._options, self._number, self._facts = asked, number, facts
        self._listener = listener
        self._room = threading.Semaphore(_MAX_CONNECTIONS)
        self._over = threading.Event()
        #: set after the first request of the first machine
        self.was_called = threading.Event()
        #: set once `exam` has the results
        self.has_exam = threading.Event()
        self.exam: Exam | None = None
        listener.settimeout(_ACCEPT_S)
        self._thread = threading.Thread(target=self._accept, name="doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connected, (address, *_) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # such as too many open files: the caller and the error persist, so pause
                self._over.wait(_ACCEPT_S)
                continue
            self._accept_caller(connected, address)

    def _accept_caller(self, connected: socket.socket, address: str) -> None:
        if address not in self._options.hosts or not self._room.acquire(blocking=False):
            connected.close()
            return
        threading.Thread(target=self._serve, args=(connected, address), daemon=True).start()

    def _serve(self, connected: socket.socket, address: str) -> None:
        wire = DoctorChannel(connected, address, _SILENT_S)
        try:
            own = self._options.hosts[self._number]
            request = wire.admit(self._token, address, own)
            while request is not None:
                if isinstance(request, Receive):
                    # the doctors have the same options, so this limit fits an honest request
                    probe.receive_for(wire, min(request.seconds, self._options.seconds))
                    return
                wire.send(self._reply_to(request, address))
                request = wire.receive_request()
        except (FleetError, OSError):
            pass  # the caller notices the lost connection
        finally:
            wire.close()
            self._room.release()

    def _reply_to(self, request: Request, address: str) -> Reply:
        if address == self._options.hosts[0]:
            self.was_called.set()
        elif isinstance(request, (Measure, Finish)):
            return Refused(f"only {self._options.hosts[0]} may request that")
        return self.reply(request)

    def reply(self, request: Request) -> Reply:
        """Carry out a request; the first doctor also calls this for its own machine."""
        match request:
            case GetFacts():
                return self._facts
            case GetTime():
                return Time(time.time())
            case Measure():
                return self._measured(request)
            case Echo():
                return Acknowledged()
            case Finish(exam=exam):
                self.exam = exam
                self.has_exam.set()
                return Acknowledged()
        return Refused(f"unexpected {type(request).__name__}")

    def _measured(self, request: Measure) -> Reply:
        asked = self._options
        others = set(range(len(asked.hosts))) - {self._number}
        if request.receiver not in others or len(request.ports) > len(asked.ports) + 1:
            return Refused(f"no machine {request.receiver}, or too many ports")
        link = Link(sender=self._number, receiver=request.receiver)
        own, to = asked.hosts[self._number], asked.hosts[request.receiver]
        return probe.measure(own, to, asked.port, link, request.ports, asked.seconds, self._token)


Say = Callable[[str], None]

#: the intervals of attempts to reach doctors, and of messages about missing ones
_LOOK_S, TELL_S = 0.2, 3.0
#: the limit of a first connection, which a firewall may drop
_DIAL_S = 1.0
#: how often the first machine may be unreachable before it counts as lost
_STRIKES = 3
#: measurements from this duration on are announced
_LONG_S = 30.0


def examine_together(
    asked: ExamOptions,
    number: int,
    facts: Facts,
    deadline_s: float,
    say: Say,
    token: Secret | None = None,
) -> Exam:
    """Examine all machines together and return the results; this machine has `number`."""
    own = asked.hosts[number]
    with contextlib.ExitStack() as leaving:
        listener = ports.listen(own, asked.port)
        if listener is None:
            raise LaunchError(
                f"port {asked.port} on {own}, the rendezvous of the doctors, is taken"
                f"{ports.owner(asked.port)}; end that process or choose another --port on all "
                "machines"
            )
        held = PortListeners(own, asked.ports)
        leaving.callback(held.close)
        facts = msgspec.structs.replace(facts, taken=held.taken, listening=held.ports)
        service = DoctorService(listener, asked, number, facts, token)
        leaving.callback(service.close)
        if number == 0:
            return _Leader(asked, service, facts, say, token).examine(deadline_s)
        return _Follower(asked, service, facts, say, number).await_exam(deadline_s)


class _Leader:
    """The doctor of the first machine."""

    def __init__(
        self,
        asked: ExamOptions,
        service: DoctorService,
        facts: Facts,
        say: Say,
        token: Secret | None,
    ) -> None:
        self._options, self._service, self._say, self._token = asked, service, say, token
        self._facts = {0: facts}
        #: the reason why a machine is absent
        self._absent = dict.fromkeys(range(1, len(asked.hosts)), "not called yet")

    def examine(self, deadline_s: float) -> Exam:
        """Wait for the others, let each measure its links in turn, and send them the results."""
        self._gather(deadline_s)
        pairs = list(itertools.permutations(sorted(self._facts), 2))
        self._announce(len(pairs))
        links = tuple(self._measured(sender, receiver) for sender, receiver in pairs)
        exam = Exam(
            asked=self._options,
            facts=dict(sorted(self._facts.items())),
            absent=self._absent,
            links=links,
            clocks=dict(self._clocks()),
        )
        return msgspec.structs.replace(exam, uninformed=dict(self._tell(exam)))

    def _announce(self, links: int) -> None:
        """Announce a long measurement; links are measured one by one, not to slow each other."""
        seconds = links * self._options.seconds
        if seconds >= _LONG_S:
            self._say(
                f"measuring {links} links, one after another, for {self._options.seconds:g} s "
                f"each: {_duration(seconds)} or more; a smaller --seconds takes less"
            )

    def _others(self) -> list[int]:
        return sorted(number for number in self._facts if number != 0)

    def _gather(self, deadline_s: float) -> None:
        begin = reported_at = time.monotonic()
        while self._absent and time.monotonic() - begin < deadline_s:
            for number in list(self._absent):
                self._look_for(number)
            if self._absent and time.monotonic() - reported_at >= TELL_S:
                reported_at = time.monotonic()
                self._say(f"not ready: {self._missing()}")
            if self._absent:
                time.sleep(_LOOK_S)

    def _missing(self) -> str:
        port = self._options.port
        return ", ".join(
            f"{endpoint_text((self._options.hosts[number], port))} ({why})"
            for number, why in self._absent.items()
        )

    def _look_for(self, number: int) -> None:
        try:
            with self._wire(number, _DIAL_S) as wire:
                facts = wire.call(GetFacts(), Facts)
        except (FleetError, OSError) as error:
            self._absent[number] = _why(error)
        else:
            self._take(number, facts)

    def _take(self, number: int, facts: Facts) -> None:
        theirs = facts.asked.hosts
        if theirs != self._options.hosts:
            self._absent[number] = f"was started with --ips that resolve to {', '.join(theirs)}"
            return
        del self._absent[number]
        self._facts[number] = facts

    @contextlib.contextmanager
    def _wire(self, number: int, limit_s: float = probe.LIMIT_S) -> Iterator[DoctorChannel]:
        hosts = self._options.hosts
        wire = dial(hosts[number], self._options.port, hosts[0], limit_s)
        try:
            if self._token is not None:
                wire.introduce(self._token, hosts[0], hosts[number])
            yield wire
        finally:
            wire.close()

    def _tell(self, exam: Exam) -> Iterator[tuple[int, str]]:
        """Send the results to the others; yield those that did not receive them, and why."""
        for number in self._others():
            try:
                with self._wire(number) as wire:
                    wire.call(Finish(exam), Acknowledged)
            except (FleetError, OSError) as error:
                yield number, _why(error)

    def _measured(self, sender: int, receiver: int) -> Link:
        hosts = self._options.hosts
        self._say(f"measuring {hosts[sender]} -> {hosts[receiver]}")
        request = Measure(receiver, self._facts[receiver].listening)
        try:
            return self._ask_to_measure(sender, request)
        except (FleetError, OSError) as error:
            return Link(sender=sender, receiver=receiver, error=_why(error))

    def _ask_to_measure(self, sender: int, request: Measure) -> Link:
        if sender == 0:
            reply = self._service.reply(request)
            assert isinstance(reply, Link)
            return reply
        # connections that a firewall drops end by their timeouts
        more_s = self._options.seconds + 4 * probe.LIMIT_S + 2 * probe.PORT_S * len(request.ports)
        with self._wire(sender) as wire:
            return wire.call(request, Link, more_s)

    def _clocks(self) -> Iterator[tuple[int, float]]:
        for number in self._others():
            # sending the results reports a machine that has gone
            with contextlib.suppress(FleetError, OSError), self._wire(number) as wire:
                yield number, probe.clock_ahead(wire)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _why(error: FleetError | OSError) -> str:
    """A short reason."""
    return str(error) if isinstance(error, FleetError) else probe.why(error)


class _Follower:
    """The doctor of another machine."""

    def __init__(
        self, asked: ExamOptions, service: DoctorService, facts: Facts, say: Say, number: int
    ) -> None:
        self._options, self._service, self._say = asked, service, say
        self._facts = {number: facts}
        self._first = endpoint_text((asked.hosts[0], asked.port))
        self._own = asked.hosts[number]
        self._strikes = 0

    def await_exam(self, deadline_s: float) -> Exam:
        """The results from the first doctor, or results with the reason why it sent none."""
        if not self._wait(self._service.was_called.is_set, deadline_s, lost=False):
            return self._exam_without(self._state())
        self._say(f"{self._first} has started the examination")
        if self._wait(self._service.has_exam.is_set, self._longest_s(deadline_s), lost=True):
            assert self._service.exam is not None
            return self._service.exam
        return self._exam_without("disconnected before it sent the results")

    def _longest_s(self, deadline_s: float) -> float:
        """The longest time of an examination: the first doctor's wait and all measurements."""
        machines = len(self._options.hosts)
        ports_s = 2 * probe.PORT_S * (len(self._options.ports) + 1)
        each = self._options.seconds + 6 * probe.LIMIT_S + ports_s
        return deadline_s + machines * (machines - 1) * each

    def _wait(self, is_done: Callable[[], bool], limit_s: float, *, lost: bool) -> bool:
        """Wait until `is_done`; False on timeout or, with `lost`, once the first is unreachable."""
        begin = reported_at = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now - begin > limit_s:
                return False
            if now - reported_at >= TELL_S:
                reported_at = now
                state = self._state()
                if lost and self._strikes >= _STRIKES:
                    return is_done()
                if not lost:
                    self._say(f"not ready: {self._first} ({state})")
            time.sleep(_LOOK_S)
        return True

    def _state(self) -> str:
        """Try to connect to the first doctor; return the state of its machine."""
        try:
            dial(self._options.hosts[0], self._options.port, self._own, _DIAL_S).close()
        except OSError as error:
            self._strikes += 1
            return probe.why(error)
        self._strikes = 0
        return f"listens, but has not called {self._own}: can it reach this machine?"

    def _exam_without(self, why: str) -> Exam:
        return Exam(asked=self._options, facts=self._facts, absent={0: why})
