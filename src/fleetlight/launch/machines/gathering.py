# SPDX-License-Identifier: Apache-2.0
"""How launchers find each other and come to one layout: reach the store, meet, exchange."""

from __future__ import annotations

import json
import threading
import time

from fleetlight.errors import LaunchError
from fleetlight.launch.job.layout import Layout, Node, check, in_order
from fleetlight.launch.job.spec import Meeting
from fleetlight.launch.machines import store
from fleetlight.launch.machines.heartbeats import Counters, Heartbeats
from fleetlight.launch.machines.link import Retry
from fleetlight.launch.machines.patience import Patience
from fleetlight.launch.processes import ports
from fleetlight.roles.role import endpoint_text


def reach(
    meeting: Meeting, patience: Patience, retry: Retry | None = None
) -> tuple[store.Store, bool]:
    """The launchers' store, and whether it is served here or was found on node 0."""
    if meeting.is_master:
        served = store.serve(meeting)
        if served is not None:
            return served, True
        _check_may_be_served_by_another(meeting)
    patience.wait(
        lambda: store.is_served(meeting),
        lambda: f"not ready endpoints: ['{endpoint_text(meeting.master)}']",
    )
    return store.connect(meeting, patience.left_s, retry), False


def _check_may_be_served_by_another(meeting: Meeting) -> None:
    # Two launchers on one machine without --rank: the first one serves. Else the port is taken.
    if meeting.hosts or meeting.rank == 0:
        host, port = meeting.master
        flag = "--start_port" if meeting.hosts else "--master"
        raise LaunchError(
            f"port {port} on {host}, where the machines meet, is taken{ports.owner(port)}; end "
            f"that process or choose another {flag} on all machines"
        )


class Meet:
    """Runs torch's rendezvous, which blocks, beside a loop that stays awake."""

    def __init__(self, rendezvous: store.Rendezvous) -> None:
        self._found: tuple[str, int, int] | None = None
        self._error: Exception | None = None
        self._rendezvous = rendezvous
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._rendezvous.next_round()
        except Exception as error:  # told to the loop, which raises it
            self._error = error

    def is_done(self) -> bool:
        """True when the machines are there; raises what the rendezvous raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def found(self) -> tuple[str, int, int]:
        """The round's name, a number in 0..n-1, and n."""
        assert self._found is not None
        return self._found


def exchange(
    node: Node,
    met: tuple[Counters, int, int],
    heartbeats: Heartbeats,
    meeting: Meeting,
    patience: Patience,
) -> tuple[Layout, tuple[int, ...], list[str]]:
    """Everybody's node, in order, with their launchers' numbers, and warnings."""
    shared, number, count = met
    shared.set(f"node/{number}", json.dumps([node.to_dict(), heartbeats.number]))
    keys = [f"node/{other}" for other in range(count)]

    def all_there() -> bool:
        heartbeats.beat(time.monotonic())
        return shared.check(keys)

    patience.wait(all_there, lambda: "a machine met the others but did not say what it has")
    told = [json.loads(shared.get(key)) for key in keys]
    pairs = [(Node.from_dict(data), launcher) for data, launcher in told]
    return _arranged([n for n, _ in pairs], [launcher for _, launcher in pairs], number, meeting)


def _arranged(
    nodes: list[Node], launchers: list[int], number: int, meeting: Meeting
) -> tuple[Layout, tuple[int, ...], list[str]]:
    warnings = check(nodes)
    ordered = in_order(nodes, meeting)
    places = [next(n for n, one in enumerate(nodes) if one is node) for node in ordered]
    layout = Layout(nodes=ordered, own=places.index(number))
    return layout, tuple(launchers[place] for place in places), warnings
