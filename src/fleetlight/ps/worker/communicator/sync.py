# SPDX-License-Identifier: Apache-2.0
"""Sync: a step waits for the gradients of all workers, and the reply has the new values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetlight.errors import ConfigError
from fleetlight.ps.update import Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.base import Communicator, clip_factor
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.lookahead.lookahead import Lookahead
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher
from fleetlight.ps.worker.lookahead.pull_in_push import PullInPush
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues


class Sync(Communicator):
    """Equal to training with all batches in one process."""

    def __init__(self, client: Client, live: LocalParameters) -> None:
        super().__init__(client, live)
        self.lookahead: Lookahead = (
            PullInPush(client, renews=True) if client.servers_are_local else Prefetcher(client)
        )
        #: by optimizer: the gradients held on the servers, and their clip factor
        self._held: dict[int, tuple[PushRequest, float]] = {}

    def step(self, update: Update) -> bool:
        """Push, and take the values of the reply."""
        try:
            values = self._push(update)
        except Exception:
            # some servers may have applied the step
            self.drop_prefetched()
            raise
        self.steps += 1
        self.made = self.acknowledged = self.made + 1
        self.note(values)
        self.client.unpack(values, self.live)
        self.lookahead.pushed(update.optimizer, values)
        if self.cached is not None:
            self.cached.stepped(update, values)
        return values.applied

    def _push(self, update: Update) -> ReplyValues:
        held = self._held.pop(update.optimizer, None)
        if held is not None:
            push, factor = held
            push.skip, push.origin = update.skip, self.origin(update, 1)
            self._ask(update, push)
            return self.client.apply(push, phase=self.phase, factor=factor)
        update.seen = tuple(self.versions)
        push = self._build_push(update)
        push.origin = self.origin(update, 1)
        self._ask(update, push)
        return self.client.push(push, phase=self.phase)

    def _ask(self, update: Update, push: PushRequest) -> None:
        """Ask for the rows of the next batch, and for changes of rows that are kept here."""
        push.ahead = self.lookahead.wanted(update.optimizer)
        if self.cached is not None:
            push.reports = self.cached.reports(update)

    def _build_push(self, update: Update) -> PushRequest:
        memory = self.client.push_memory(update)
        return self.client.build_push(update, self.live, memory=memory)

    def clip(self, updates: Sequence[Update], max_norm: float, norm_type: float) -> float:
        """The norm of the gradient of all workers together: known to the servers only."""
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_: got norm_type={norm_type:g}, expected 2: in sync mode each "
                "server computes a part of the norm"
            )
        square, pushes = 0.0, []
        for update in updates:
            update.seen = tuple(self.versions)
            push = self._build_push(update)
            values = self.client.push(push, phase=self.phase, hold=True, wants_dense=False)
            square += values.square
            pushes.append(push)
        total = math.sqrt(square)
        factor = clip_factor(total, max_norm)
        self._held.update({push.optimizer: (push, factor) for push in pushes})
        return total
