# SPDX-License-Identifier: Apache-2.0
"""`DoctorService`: a doctor's answers to the others."""

from __future__ import annotations

import socket
import threading
import time

from fleetlight.errors import FleetError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    ExamOptions,
    Facts,
    Finish,
    Link,
    Measure,
    Receive,
    Refused,
    Reply,
    Request,
    TellFacts,
    TellTime,
    Time,
)
from fleetlight.roles.secret import Secret

#: connections of others at a time; one is what they need
_MOST = 16
#: how long a connection may be silent
_SILENT_S = 30.0
_LOOK_S = 0.2


class DoctorService:
    """Listens until it is closed; only to machines of the list, and only the first may command."""

    def __init__(
        self,
        listener: socket.socket,
        asked: ExamOptions,
        number: int,
        facts: Facts,
        token: Secret | None = None,
    ) -> None:
        self._token = token
        self._asked, self._number, self._facts = asked, number, facts
        self._listener = listener
        self._room = threading.Semaphore(_MOST)
        self._over = threading.Event()
        #: set once the first machine has asked for anything
        self.asked = threading.Event()
        #: set once it has told what was found: `exam`
        self.told = threading.Event()
        self.exam: Exam | None = None
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer."""
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
                # such as too many open files: whoever knocks stays there, and so does the error
                self._over.wait(_LOOK_S)
                continue
            self._let_in(connected, address)

    def _let_in(self, connected: socket.socket, address: str) -> None:
        if address not in self._asked.hosts or not self._room.acquire(blocking=False):
            connected.close()
            return
        threading.Thread(target=self._serve, args=(connected, address), daemon=True).start()

    def _serve(self, connected: socket.socket, address: str) -> None:
        wire = DoctorChannel(connected, address, _SILENT_S)
        try:
            own = self._asked.hosts[self._number]
            request = wire.admit(self._token, address, own)
            while request is not None:
                if isinstance(request, Receive):
                    # it is asked for by a doctor that was started with as many seconds
                    probe.receive_for(wire, min(request.seconds, self._asked.seconds))
                    return
                wire.say(self._reply_to(request, address))
                request = wire.request()
        except (FleetError, OSError):
            pass  # whoever asked finds out by itself
        finally:
            wire.close()
            self._room.release()

    def _reply_to(self, request: Request, address: str) -> Reply:
        if address == self._asked.hosts[0]:
            self.asked.set()
        elif isinstance(request, (Measure, Finish)):
            return Refused(f"only {self._asked.hosts[0]} may ask for that")
        return self.answer(request)

    def answer(self, request: Request) -> Reply:
        """What this machine has to say; the doctor of the first one asks itself here."""
        if isinstance(request, TellFacts):
            return self._facts
        if isinstance(request, TellTime):
            return Time(time.time())
        if isinstance(request, Measure):
            return self._measured(request)
        if isinstance(request, Finish):
            self.exam = request.exam
            self.told.set()
        return (
            Acknowledged() if isinstance(request, (Echo, Finish)) else Refused("not asked this way")
        )

    def _measured(self, request: Measure) -> Reply:
        asked = self._asked
        others = set(range(len(asked.hosts))) - {self._number}
        if request.receiver not in others or len(request.ports) > len(asked.ports) + 1:
            return Refused(f"no machine {request.receiver}, or too many ports")
        link = Link(sender=self._number, receiver=request.receiver)
        own, to = asked.hosts[self._number], asked.hosts[request.receiver]
        return probe.measure(own, to, asked.port, link, request.ports, asked.seconds, self._token)
