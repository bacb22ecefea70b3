# SPDX-License-Identifier: Apache-2.0
"""Connect to the launchers' store, agree on a layout, and leave the store at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection

from fleetlight.errors import LaunchError
from fleetlight.launch.job.layout import JobLayout, Node, check, ordered
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines import store
from fleetlight.launch.machines.exchanged.heartbeats import Counters, Heartbeats
from fleetlight.launch.machines.start_deadline import StartDeadline
from fleetlight.launch.machines.store_connection import Retry
from fleetlight.launch.processes import ports
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.roles.role import endpoint_text

#: how long to serve launchers that never joined a start of the job, and cannot know its end
STRANGERS_S = 5.0
_LOOK_S = 0.05


def reach(
    spec: RendezvousSpec, deadline: StartDeadline, retry: Retry | None = None
) -> tuple[store.Store, bool]:
    """Serve or connect to the launchers' store; return it, and True if it is served here."""
    if spec.is_master:
        served = store.serve(spec)
        if served is not None:
            return served, True
        _check_may_be_served_by_another(spec)
    deadline.wait(
        lambda: store.is_served(spec),
        lambda: f"not ready endpoints: ['{endpoint_text(spec.master)}']",
    )
    return store.connect(spec, deadline.left_s, retry), False


def _check_may_be_served_by_another(spec: RendezvousSpec) -> None:
    # of two launchers on one machine without --rank, the first serves; else the port is taken
    if spec.hosts or spec.rank == 0:
        host, port = spec.master
        flag = "--start_port" if spec.hosts else "--master"
        raise LaunchError(
            f"port {port} on {host}, the rendezvous of the machines, is taken{ports.owner(port)}; "
            f"end that process or choose another {flag} on all machines"
        )


class RendezvousThread:
    """Runs torch's rendezvous, which blocks, on a thread of its own."""

    def __init__(self, rendezvous: store.Rendezvous) -> None:
        self._found: tuple[str, int, int] | None = None
        self._error: Exception | None = None
        self._rendezvous = rendezvous
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._rendezvous.next_round()
        except Exception as error:  # is_done raises it
            self._error = error

    def is_done(self) -> bool:
        """True when the rendezvous is complete; raise its error if it failed."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def found(self) -> tuple[str, int, int]:
        """The round's name, this machine's number in 0..n-1, and n."""
        assert self._found is not None
        return self._found


def exchange(
    node: Node,
    joined: tuple[Counters, int, int],
    heartbeats: Heartbeats,
    spec: RendezvousSpec,
    deadline: StartDeadline,
) -> tuple[JobLayout, tuple[int, ...], list[str]]:
    """Exchange nodes; return the layout, the launchers' numbers in its order, and warnings."""
    shared, number, count = joined
    shared.set(f"node/{number}", json.dumps([node.to_dict(), heartbeats.number]))
    keys = [f"node/{other}" for other in range(count)]

    def all_there() -> bool:
        heartbeats.beat(time.monotonic())
        return shared.check(keys)

    deadline.wait(all_there, lambda: "a machine joined but did not send its description")
    descriptions = [json.loads(shared.get(key)) for key in keys]
    pairs = [(Node.from_dict(data), launcher) for data, launcher in descriptions]
    return _layout_of([n for n, _ in pairs], [launcher for _, launcher in pairs], number, spec)


def _layout_of(
    nodes: list[Node], launchers: list[int], number: int, spec: RendezvousSpec
) -> tuple[JobLayout, tuple[int, ...], list[str]]:
    warnings = check(nodes)
    in_order = ordered(nodes, spec)
    places = [next(n for n, one in enumerate(nodes) if one is node) for node in in_order]
    layout = JobLayout(nodes=in_order, own=places.index(number))
    return layout, tuple(launchers[place] for place in places), warnings


def serve_until_others_leave(
    heartbeats: Heartbeats, job_launchers: Collection[int], longest_s: float, interrupts: Interrupts
) -> None:
    """Serve the store until every other launcher has left or is silent.

    `job_launchers` took part in the last start of the job and have `longest_s` to leave.
    Another interrupt ends the wait.
    """
    began, interrupts_before = time.monotonic(), len(interrupts.seen)
    # a launcher may have joined since the last beat, if the job was short
    heartbeats.poll(began)
    while len(interrupts.seen) == interrupts_before:
        now = time.monotonic()
        heartbeats.beat(now)
        staying = heartbeats.remaining(now)
        waited_for = {
            number
            for number in staying
            if not heartbeats.is_late(
                number, began, now, longest_s if number in job_launchers else STRANGERS_S
            )
        }
        if not waited_for:
            return
        time.sleep(_LOOK_S)
