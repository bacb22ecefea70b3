# SPDX-License-Identifier: Apache-2.0
"""`RunningJoins`: the requests of workers that join while the job runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from fleetlight.errors import MembershipError, ProtocolError, counted
from fleetlight.ps import messages as m
from fleetlight.ps.server.membership import WorkerMembership
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.roles.role import Endpoint


class RunningJoins:
    """A worker gets a place, then the prelude, then the state at a turn, and takes part."""

    def __init__(
        self,
        presence: PresenceMonitor,
        membership: WorkerMembership,
        version: str,
        *,
        holds_turns: bool,
    ) -> None:
        """`holds_turns`: this is server 0, which decides at which turn a worker joins."""
        self._presence, self._membership, self._version = presence, membership, version
        self._holds_turns = holds_turns
        #: the id of the job, and where its servers listen
        self.job = ""
        self.server_endpoints: Sequence[Endpoint] = ()
        self.announces = False
        #: the folder of the job's checkpoints
        self.checkpoint = ""

    def place(self, message: m.PlaceRequest) -> Reply:
        """A free place for a worker that will join; it has the versions of this process."""
        self._check_versions(message)
        roster = self._presence.roster
        with self._presence.changed:
            self._presence.check()
            if not roster.is_elastic:
                raise MembershipError(
                    f"a worker wants to join, but this job keeps its "
                    f"{counted(roster.worker_num, 'worker')}; start a job that workers may join "
                    "with fleetrun --worker_max N (FLEET_WORKER_MAX)"
                )
            if not self._holds_turns:
                raise MembershipError(
                    "a worker wants to join, but this is not server 0; give FLEET_JOIN the "
                    "host:port of server 0"
                )
            place = self._presence.place_for(message.started_at)
        if place is None:
            raise MembershipError(
                f"a worker wants to join, but all {roster.places} places of the job are taken; "
                "give the job more places at its start (fleetrun --worker_max N)"
            )
        found = m.FreePlace(
            worker=place,
            worker_num=roster.worker_num,
            worker_max=roster.places,
            server_endpoints=list(self.server_endpoints),
            announces=self.announces,
            job=self.job,
            checkpoint=self.checkpoint,
        )
        return found, []

    def handle(self, peer: Peer, message: m.Message, arrays: Sequence[NDArray[Any]]) -> Reply:
        """Handle a request of a worker with a place, or the state that worker 0 sends."""
        match message:
            case m.PreludeRequest():
                return self._membership.prelude()
            case m.Admit():
                return self._membership.shard_queue.admit(peer, message)
            case m.OfferState():
                return self._membership.shard_queue.offer(message, arrays)
            case m.Enter():
                return self._membership.enter(peer, message, holds_turn=self._holds_turns)
            case m.EnteredAll():
                return self._membership.shard_queue.entered_all(peer)
        raise ProtocolError(f"{peer} sent {type(message).__name__}, which is no request to join")

    def _check_versions(self, message: m.PlaceRequest) -> None:
        for fact, theirs, here in (
            ("fleetlight", message.fleetlight, self._version),
            ("torch", message.torch, str(torch.__version__)),
        ):
            if theirs != here:
                raise MembershipError(
                    f"a worker wants to join with {fact} {theirs}, but this job runs {here}; use "
                    "one version everywhere"
                )
