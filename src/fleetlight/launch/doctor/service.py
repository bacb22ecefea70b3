# SPDX-License-Identifier: Apache-2.0
"""`DoctorService`: serves the requests of other doctors."""

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
from fleetlight.roles.secret import Secret

#: most connections at a time; the doctors need one
_MAX_CONNECTIONS = 16
#: how long a connection may be idle
_SILENT_S = 30.0
_LOOK_S = 0.2


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
        listener.settimeout(_LOOK_S)
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
                self._over.wait(_LOOK_S)
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
