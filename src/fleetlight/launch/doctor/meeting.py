# SPDX-License-Identifier: Apache-2.0
"""How the doctors of several machines come to one exam: the first asks, all others answer."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import msgspec

from fleetlight.errors import FleetError, LaunchError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.facts import PortListeners
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Exam,
    ExamOptions,
    Facts,
    Finish,
    Link,
    Measure,
    TellFacts,
)
from fleetlight.launch.doctor.service import DoctorService
from fleetlight.launch.processes import ports
from fleetlight.roles.role import endpoint_text
from fleetlight.roles.secret import Secret

Say = Callable[[str], None]

#: how often the others are looked for, and the user is told who is missing
_LOOK_S, TELL_S = 0.2, 3.0
#: how long a first connection may take; one that a firewall swallows is never answered
_DIAL_S = 1.0
#: how often the first machine may be out of reach before it counts as gone
_STRIKES = 3
#: how long measuring takes if that is worth a word
_LONG_S = 30.0


def meet(
    asked: ExamOptions,
    number: int,
    facts: Facts,
    deadline_s: float,
    say: Say,
    token: Secret | None = None,
) -> Exam:
    """What was found on all machines and between them; this is the one with that number."""
    own = asked.hosts[number]
    with contextlib.ExitStack() as leaving:
        listener = ports.listen(own, asked.port)
        if listener is None:
            raise LaunchError(
                f"port {asked.port} on {own}, where doctors meet, is taken"
                f"{ports.owner(asked.port)}; end that process or choose another --port everywhere"
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
        self._asked, self._service, self._say, self._token = asked, service, say, token
        self._facts = {0: facts}
        #: why a machine is not here
        self._absent = dict.fromkeys(range(1, len(asked.hosts)), "not asked yet")

    def examine(self, deadline_s: float) -> Exam:
        """Wait for the others, have each measure its links in turn, and tell them all."""
        self._gather(deadline_s)
        pairs = list(itertools.permutations(sorted(self._facts), 2))
        self._announce(len(pairs))
        links = tuple(self._measured(sender, receiver) for sender, receiver in pairs)
        exam = Exam(
            asked=self._asked,
            facts=dict(sorted(self._facts.items())),
            absent=self._absent,
            links=links,
            clocks=dict(self._clocks()),
        )
        return msgspec.structs.replace(exam, untold=dict(self._tell(exam)))

    def _announce(self, links: int) -> None:
        """Say how long it takes where that is long: two at a time would slow each other."""
        seconds = links * self._asked.seconds
        if seconds >= _LONG_S:
            self._say(
                f"{links} links are measured, one after another, for {self._asked.seconds:g} s "
                f"each: {_duration(seconds)} or more; a smaller --seconds takes less"
            )

    def _others(self) -> list[int]:
        return sorted(number for number in self._facts if number != 0)

    def _gather(self, deadline_s: float) -> None:
        begin = told = time.monotonic()
        while self._absent and time.monotonic() - begin < deadline_s:
            for number in list(self._absent):
                self._look_for(number)
            if self._absent and time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                self._say(f"not ready: {self._missing()}")
            if self._absent:
                time.sleep(_LOOK_S)

    def _missing(self) -> str:
        port = self._asked.port
        return ", ".join(
            f"{endpoint_text((self._asked.hosts[number], port))} ({why})"
            for number, why in self._absent.items()
        )

    def _look_for(self, number: int) -> None:
        try:
            with self._wire(number, _DIAL_S) as wire:
                facts = wire.ask(TellFacts(), Facts)
        except (FleetError, OSError) as error:
            self._absent[number] = _why(error)
        else:
            self._take(number, facts)

    def _take(self, number: int, facts: Facts) -> None:
        theirs = facts.asked.hosts
        if theirs != self._asked.hosts:
            self._absent[number] = f"was started with --ips that stand for {', '.join(theirs)}"
            return
        del self._absent[number]
        self._facts[number] = facts

    @contextlib.contextmanager
    def _wire(self, number: int, limit_s: float = probe.LIMIT_S) -> Iterator[DoctorChannel]:
        hosts = self._asked.hosts
        wire = dial(hosts[number], self._asked.port, hosts[0], limit_s)
        try:
            if self._token is not None:
                wire.introduce(self._token, hosts[0], hosts[number])
            yield wire
        finally:
            wire.close()

    def _tell(self, exam: Exam) -> Iterator[tuple[int, str]]:
        """Tell all the others; who cannot be told, and why."""
        for number in self._others():
            try:
                with self._wire(number) as wire:
                    wire.ask(Finish(exam), Acknowledged)
            except (FleetError, OSError) as error:
                yield number, _why(error)

    def _measured(self, sender: int, receiver: int) -> Link:
        hosts = self._asked.hosts
        self._say(f"measuring {hosts[sender]} -> {hosts[receiver]}")
        request = Measure(receiver, self._facts[receiver].listening)
        try:
            return self._ask_to_measure(sender, request)
        except (FleetError, OSError) as error:
            return Link(sender=sender, receiver=receiver, error=_why(error))

    def _ask_to_measure(self, sender: int, request: Measure) -> Link:
        if sender == 0:
            answer = self._service.answer(request)
            assert isinstance(answer, Link)
            return answer
        # what is swallowed by a firewall takes its time
        more_s = self._asked.seconds + 4 * probe.LIMIT_S + 2 * probe.PORT_S * len(request.ports)
        with self._wire(sender) as wire:
            return wire.ask(request, Link, more_s)

    def _clocks(self) -> Iterator[tuple[int, float]]:
        for number in self._others():
            # who went away meanwhile is missed when it is told what was found
            with contextlib.suppress(FleetError, OSError), self._wire(number) as wire:
                yield number, probe.clock_ahead(wire)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _why(error: FleetError | OSError) -> str:
    """In few words; errors of ours have their own."""
    return str(error) if isinstance(error, FleetError) else probe.why(error)


class _Follower:
    """The doctor of any other machine."""

    def __init__(
        self, asked: ExamOptions, service: DoctorService, facts: Facts, say: Say, number: int
    ) -> None:
        self._asked, self._service, self._say = asked, service, say
        self._facts = {number: facts}
        self._first = endpoint_text((asked.hosts[0], asked.port))
        self._own = asked.hosts[number]
        self._strikes = 0

    def await_exam(self, deadline_s: float) -> Exam:
        """What the first doctor tells; if it does not, that is what was found."""
        if not self._wait(self._service.asked.is_set, deadline_s, lost=False):
            return self._exam_without(self._state())
        self._say(f"{self._first} is here and asks")
        if self._wait(self._service.told.is_set, self._longest_s(deadline_s), lost=True):
            assert self._service.exam is not None
            return self._service.exam
        return self._exam_without("went away before it told what was found")

    def _longest_s(self, deadline_s: float) -> float:
        """The first may wait for others as long, and then has every link measured."""
        machines = len(self._asked.hosts)
        ports_s = 2 * probe.PORT_S * (len(self._asked.ports) + 1)
        each = self._asked.seconds + 6 * probe.LIMIT_S + ports_s
        return deadline_s + machines * (machines - 1) * each

    def _wait(self, is_done: Callable[[], bool], limit_s: float, *, lost: bool) -> bool:
        """Whether it is done in time; with `lost`, only as long as the first can be reached."""
        begin = told = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now - begin > limit_s:
                return False
            if now - told >= TELL_S:
                told = now
                state = self._state()
                if lost and self._strikes >= _STRIKES:
                    return is_done()
                if not lost:
                    self._say(f"not ready: {self._first} ({state})")
            time.sleep(_LOOK_S)
        return True

    def _state(self) -> str:
        """What the first machine does when it is knocked at."""
        try:
            dial(self._asked.hosts[0], self._asked.port, self._own, _DIAL_S).close()
        except OSError as error:
            self._strikes += 1
            return probe.why(error)
        self._strikes = 0
        return f"listens, but has not asked {self._own}: can it be reached from there?"

    def _exam_without(self, why: str) -> Exam:
        return Exam(asked=self._asked, facts=self._facts, absent={0: why})
