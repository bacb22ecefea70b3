# SPDX-License-Identifier: Apache-2.0
"""`Client`: splits the requests of a worker among all servers and merges their replies.

A communicator decides when to call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PlanError
from fleetlight.kernels import dedup
from fleetlight.observe.tracing.spans import spans
from fleetlight.ps import messages as m
from fleetlight.ps.high_water_marks import common_epoch
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import Plan
from fleetlight.ps.tables.unpacking import Unpacking
from fleetlight.ps.transport.interface import ReceivedReply
from fleetlight.ps.update import Floats, Ids, TableGradients, Update
from fleetlight.ps.wire_forms import Output, encoded, encoded_gradients, no_output
from fleetlight.ps.worker.chunks import CHUNK_BYTES, LONE_CHUNK_BYTES, Chunk, chunks_of
from fleetlight.ps.worker.connections import (
    CONTROL,
    PULL,
    PUSH,
    Connect,
    Connections,
    Request,
    SentRequests,
)
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.push_request import (
    PushRequest,
    Shares,
    behind_tables,
    check_differences,
    checked,
    packed,
)
from fleetlight.ps.worker.replay.commit_log import Committed
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepJournal, StepOrigin
from fleetlight.ps.worker.reply_values import (
    ReplyValues,
    Wanted,
    changed_rows,
    merged_versions,
    outdated_ids,
)
from fleetlight.wire.control_signals import combined

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class PushInFlight:
    """A push whose replies are not received yet."""

    push: PushRequest
    sent: SentRequests


class Client(Connections):
    """Works before the plan is known, so that workers can use barriers from the start."""

    def __init__(
        self,
        worker: int,
        worker_num: int,
        server_num: int,
        connect: Connect,
        journal: StepJournal | None = None,
        worker_max: int | None = None,
    ) -> None:
        """`worker_max`: how many workers the job may have while it runs."""
        super().__init__(worker, server_num, connect)
        self.worker_num, self._worker_max = worker_num, worker_max
        self.journal: StepJournal = journal or NoJournal()
        #: the results of calls that run once in a job
        self.replies = self.journal.replies
        #: True in a resumed job that was killed before its first step
        self.is_untrained = False
        #: number of loaded checkpoints
        self.epoch = 0
        self._sequences = [0] * server_num
        last = self.journal.last
        if last is not None and last.commit.acknowledged:
            self.acknowledged = list(last.commit.acknowledged)
        self._plan: Plan | None = None
        self._placement: Placement | None = None

    def restart_script(self, *, before_any_step: bool = False) -> None:
        """Restart the script: servers drop the high-water marks of earlier incarnations."""
        self.is_untrained = before_any_step
        self.acknowledged = [0] * self.server_num

    @property
    def is_alone(self) -> bool:
        """True for a worker that never has another one beside it."""
        return (self._worker_max or self.worker_num) == 1

    @property
    def has_fixed_workers(self) -> bool:
        """False where workers join and leave while the job runs."""
        return self._worker_max is None

    @property
    def active(self) -> int:
        """How many workers train now, which share the moves of dense values."""
        if self._worker_max is None:
            return self.worker_num
        return max(1, self.active_workers or self.worker_num)

    @property
    def plan(self) -> Plan:
        """The plan of the job, after `join`."""
        assert self._plan is not None, "the plan is not known yet"
        return self._plan

    @property
    def placement(self) -> Placement:
        """The placement of dense parameters, after `join`."""
        assert self._placement is not None, "the plan is not known yet"
        return self._placement

    @property
    def has_joined(self) -> bool:
        """True once the servers have this worker's plan."""
        return self._plan is not None

    def join(self, plan: Plan) -> None:
        """Compare the plan with that of every server."""
        if plan.server_num != self.server_num or plan.worker_num != self.worker_num:
            raise PlanError(
                f"the plan is for {plan.worker_num} workers and {plan.server_num} servers, the job "
                f"has {self.worker_num} and {self.server_num}"
            )
        epochs: dict[int, int] = {}
        while missing := [n for n in range(self.server_num) if n not in epochs]:
            replies = self.ask(CONTROL, dict.fromkeys(missing, (m.Join(plan), ())))
            messages = {n: reply.message for n, reply in replies.items()}
            # the other servers still read a checkpoint
            epochs |= {n: w.epoch for n, w in messages.items() if isinstance(w, m.Welcome)}
        self.epoch = common_epoch(epochs)
        self._plan, self._placement = plan, Placement(plan)
        self.journal.begin()

    def fill(self, tables: Mapping[int, tuple[Ids, Floats]], live: LocalParameters) -> None:
        """Push the first values: rows of tables by number, and the dense parameters."""
        split = {n: dedup(ids, self.server_num) for n, (ids, _) in tables.items()}
        requests: dict[int, Request] = {}
        for server in range(self.server_num):
            arrays: list[Array] = []
            for number, (ids, rows) in tables.items():
                mine = split[number].ids[split[number].slice_of(server)]
                # ids of a moved layer are the positions of its rows
                arrays += [mine, rows[np.searchsorted(ids, mine)]]
            blocks = self.placement.blocks_of(server)
            arrays += [live.pack(block) for block in blocks]
            requests[server] = m.Fill(list(tables), bool(blocks)), arrays
        self.ask(CONTROL, requests)

    def refill(self, number: int, ids: Ids, rows: Floats, *, reset: bool) -> None:
        """Replace rows of a table; with `reset`, first reset all other rows to first values."""
        split = dedup(ids, self.server_num)
        requests: dict[int, Request] = {}
        for server in range(self.server_num):
            mine = split.slice_of(server)
            arrays: list[Array] = [split.ids[mine], rows[np.searchsorted(ids, split.ids[mine])]]
            requests[server] = m.Fill([number], False, loaded=True, reset=reset), arrays
        self.ask(CONTROL, requests)

    def refill_dense(self, live: LocalParameters) -> None:
        """Replace the dense values on the servers by those of this worker."""
        blocks = {n: self.placement.blocks_of(n) for n in range(self.server_num)}
        requests: dict[int, Request] = {
            server: (m.Fill([], True, loaded=True), [live.pack(block) for block in mine])
            for server, mine in blocks.items()
            if mine
        }
        self.ask(CONTROL, requests)

    def pull(
        self,
        wanted: Sequence[Wanted],
        *,
        dense: bool = False,
        at_least: int = 0,
        phase: int = 0,
        step: int = 0,
        batch: int | None = None,
        lane: str = PULL,
    ) -> ReplyValues:
        """Read rows of distinct ids, dense values, or both, from the servers that have any.

        With `batch`, a prefetch: the reply to the worker's next push has the rows that it changed.
        """
        requests: dict[int, Request] = {}
        for server in range(self.server_num):
            mine = [w for w in wanted if w.ids.count_of(server)]
            blocks = self.placement.blocks_of(server) if dense else []
            if not mine and not blocks:
                continue
            message = m.Pull(
                [m.TablePull(w.table, w.insert) for w in mine],
                dense=bool(blocks),
                at_least=at_least,
                phase=phase,
                step=step,
                ahead=batch is not None,
                batch=batch or 0,
            )
            requests[server] = message, [w.ids.ids[w.ids.slice_of(server)] for w in mine]
        return self._merge_replies(wanted, self.ask(lane, requests))

    def _merge_replies(
        self, wanted: Sequence[Wanted], replies: Mapping[int, ReceivedReply]
    ) -> ReplyValues:
        """Merge the rows, then the dense values, of each reply."""
        values = merged_versions(replies)
        parts: list[list[Floats]] = [[] for _ in wanted]
        for server, reply in replies.items():
            arrays = Unpacking(reply.arrays, f"the reply of server {server}", narrow=True)
            for number, w in enumerate(wanted):
                if count := w.ids.count_of(server):
                    parts[number].append(arrays.rows(self.plan.tables[w.table], count))
            if rest := arrays.rest():
                values.dense[server] = rest
        values.rows = [self._joined(part, w.table) for part, w in zip(parts, wanted, strict=True)]
        return values

    def _merge_push_replies(
        self, wanted: Sequence[Wanted], replies: Mapping[int, ReceivedReply]
    ) -> ReplyValues:
        # taken from the end of each reply
        outdated = outdated_ids(replies)
        changed = changed_rows(replies, self.plan)
        values = self._merge_replies(wanted, replies)
        values.changed, values.outdated = changed, outdated
        for reply in replies.values():
            assert isinstance(reply.message, m.Pushed), reply.message
            values.applied &= reply.message.applied
            values.square += reply.message.square
        return values

    def _joined(self, parts: list[Floats], table: int) -> Floats:
        """Concatenate rows of several servers: the ids are grouped by server."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return np.empty((0, self.plan.tables[table].dim), np.float32)
        return np.concatenate(parts)

    def push_memory(self, update: Update) -> Sequence[Output]:
        """By server: memory for the dense blocks of an update; the next push must send it."""
        outputs = [
            channel.output if self.placement.blocks_of(server, update.optimizer) else no_output
            for server, channel in enumerate(self.open_lane(PUSH))
        ]
        return behind_tables(update, self.plan, outputs)

    def build_push(
        self,
        update: Update,
        live: LocalParameters,
        shares: Shares | None = None,
        memory: Sequence[Output] | None = None,
    ) -> PushRequest:
        """Build the push request of an update; it may tell all workers to skip the step.

        `shares` replace dense gradients, whose values were checked before the step.
        """
        push = packed(update, self.plan, self.placement, live, shares, memory)
        if shares is not None:
            return push
        return checked(push, self.plan, self.placement, self.worker)

    def push(
        self,
        push: PushRequest,
        *,
        phase: int,
        hold: bool = False,
        wants_dense: bool = True,
    ) -> ReplyValues:
        """Send a push request to every server, and return the merged replies."""
        requests = self._push_requests(push, phase=phase, hold=hold, wants_dense=wants_dense)
        return self._pushed(push, self.ask(PUSH, _with_ahead(requests, push)))

    def _push_requests(
        self, push: PushRequest, *, phase: int, hold: bool = False, wants_dense: bool = True
    ) -> dict[int, Request]:
        """The request of each server, logged in the journal."""
        requests: dict[int, Request] = {}
        gradients = encoded_gradients(push.tables, self.plan, self.worker, push.step)
        for server in range(self.server_num):
            tables, arrays = _server_part(push.tables, gradients, server)
            blocks = push.blocks.get(server, [])
            message = m.Push(
                sequence=self._next(server),
                epoch=self.epoch,
                optimizer=push.optimizer,
                step=push.step,
                phase=phase,
                options=push.options,
                tables=tables,
                dense=bool(blocks),
                absent=push.absent,
                skip=push.skip,
                refusal=push.refusal,
                wants_dense=wants_dense,
                hold=hold,
                merged=push.merged,
                seen=push.seen[server] if push.seen else 0,
            )
            requests[server] = message, [*arrays, *blocks]
        if not hold:
            # held gradients change no values, and a restarted worker computes them again
            self._commit(push.origin, {server: [one] for server, one in requests.items()})
        return requests

    def apply(
        self, push: PushRequest, *, phase: int, factor: float, wants_dense: bool = True
    ) -> ReplyValues:
        """Let the servers apply the held gradients times a factor."""
        requests: dict[int, Request] = {}
        for server in range(self.server_num):
            message = m.Apply(
                sequence=self._next(server),
                epoch=self.epoch,
                optimizer=push.optimizer,
                step=push.step,
                phase=phase,
                factor=factor,
                options=push.options,
                skip=push.skip,
                wants_dense=wants_dense,
            )
            requests[server] = message, ()
        self._commit(push.origin, {server: [one] for server, one in requests.items()})
        return self._pushed(push, self.ask(PUSH, _with_ahead(requests, push)))

    def start_push(self, push: PushRequest, *, phase: int) -> PushInFlight:
        """Send a push request; nothing else may use its lane until `finish_push`."""
        requests = _with_ahead(self._push_requests(push, phase=phase), push)
        return PushInFlight(push, self.send(PUSH, requests))

    def finish_push(self, started: PushInFlight) -> ReplyValues:
        """Wait for the replies to a push, and return them merged."""
        return self._pushed(started.push, self.replies_to(started.sent))

    def _pushed(self, push: PushRequest, replies: Mapping[int, ReceivedReply]) -> ReplyValues:
        self._receive_signals(replies.values())
        values = self._merge_push_replies([one.wanted for one in push.ahead], replies)
        for one, rows in zip(push.ahead, values.rows, strict=True):
            one.arrived(rows, values)
        return values

    def _receive_signals(self, replies: Iterable[ReceivedReply]) -> None:
        """Record the control signals in replies to steps."""
        messages = [one.message for one in replies]
        self.signals.from_steps |= combined(
            o.call for o in messages if isinstance(o, (m.Pushed, m.GeoExchangeReply))
        )

    def exchange(
        self,
        tables: Mapping[int, TableGradients],
        blocks: Mapping[int, Sequence[Array]],
        *,
        step: int,
        wants: bool = True,
        origin: StepOrigin | None = None,
    ) -> ReplyValues:
        """Send differences; return the values of the same rows and blocks."""
        check_differences(tables, blocks, step, self.plan, self.placement, self.worker)
        # the chunks of different servers overlap
        piece_bytes = CHUNK_BYTES if self.server_num > 1 else LONE_CHUNK_BYTES
        sent = {n: encoded(part.gradients, self.plan.tables[n]) for n, part in tables.items()}
        pieces: dict[int, list[Chunk]] = {}
        requests: dict[int, list[Request]] = {}
        for server in range(self.server_num):
            cut = chunks_of(tables, blocks.get(server, ()), server, piece_bytes)
            if cut:
                pieces[server] = cut
                requests[server] = [
                    (
                        self._piece(server, piece, piece is cut[-1], step, wants),
                        piece.arrays(tables, sent),
                    )
                    for piece in cut
                ]
        self._commit(origin, requests)
        replies = self._ask_in_turns(PUSH, requests)
        self._receive_signals(one for received in replies.values() for one in received)
        values = merged_versions({server: received[-1] for server, received in replies.items()})
        for server, received in replies.items() if wants else ():
            for piece, reply in zip(pieces[server], received, strict=True):
                arrived = Unpacking(reply.arrays, f"the reply of server {server}", narrow=True)
                for number, span in piece.spans.items():
                    rows = arrived.rows(self.plan.tables[number], span.stop - span.start)
                    values.pieces.append((number, span, rows))
                if dense := arrived.rest():
                    values.dense[server] = dense
        return values

    def _piece(self, server: int, piece: Chunk, is_last: bool, step: int, wants: bool) -> m.Message:
        return m.GeoExchange(
            sequence=self._next(server),
            epoch=self.epoch,
            step=step,
            tables=list(piece.spans),
            dense=bool(piece.blocks),
            wants=wants,
            more=not is_last,
        )

    def unpack(self, values: ReplyValues, live: LocalParameters) -> None:
        """Copy received dense values into the user's parameters."""
        for server, arrays in values.dense.items():
            blocks = self.placement.blocks_of(server)
            for block, array in zip(blocks, arrays, strict=True):
                live.unpack(block, array)
        live.note()

    def _commit(self, origin: StepOrigin | None, requests: Mapping[int, Sequence[Request]]) -> None:
        self.journal.commit(
            origin,
            self.epoch,
            self._sequences,
            requests,
            called=self.signals.from_steps,
            acknowledged=self.acknowledged,
        )

    def repeat(self, last: Committed) -> bool:
        """Repeat a logged step; False when all workers skipped it."""
        self._sequences = list(last.commit.sequences)
        received = [
            one for replies in self._ask_in_turns(PUSH, last.requests).values() for one in replies
        ]
        # the previous incarnation may not have acted on earlier control signals
        self.signals.from_steps |= last.commit.called
        self._receive_signals(received)
        return all(getattr(reply.message, "applied", True) for reply in received)

    def end_phase(self, phase: int) -> None:
        """Tell every server that this worker makes no step before the next barrier."""
        self.everywhere(m.EndPhase(phase))

    def metrics(self) -> list[m.ServerMetrics]:
        """The counters of each server."""
        replies = self.everywhere(m.MetricsRequest())
        counted = [replies[server].message for server in range(self.server_num)]
        return [one for one in counted if isinstance(one, m.ServerMetrics)]

    def _next(self, server: int) -> int:
        self._sequences[server] += 1
        if spans.is_on:
            spans.mark(f"worker {self.worker}.{self._sequences[server]}.{server}")
        return self._sequences[server]


def _server_part(
    tables: Mapping[int, TableGradients], gradients: Mapping[int, Sequence[Array]], server: int
) -> tuple[list[m.TablePush], list[Array]]:
    """The part of one server: contiguous, since ids are grouped by server."""
    pushes: list[m.TablePush] = []
    arrays: list[Array] = []
    for number, part in tables.items():
        start, stop = int(part.starts[server]), int(part.starts[server + 1])
        if start == stop:
            continue
        pushes.append(m.TablePush(number, counted=part.shows is not None))
        arrays += [part.ids[start:stop], *(array[start:stop] for array in gradients[number])]
        if part.shows is not None and part.clicks is not None:
            arrays += [part.shows[start:stop], part.clicks[start:stop]]
    return pushes, arrays


def _with_ahead(requests: Mapping[int, Request], push: PushRequest) -> Mapping[int, Request]:
    """Let pushes or releases request rows and ids, too; the journal has them without."""
    if not push.ahead and not push.reports:
        return requests
    extended: dict[int, Request] = {}
    for server, (message, arrays) in requests.items():
        assert isinstance(message, (m.Push, m.Apply)), message
        mine = [one.wanted for one in push.ahead if one.wanted.ids.count_of(server)]
        ids = [wanted.ids.ids[wanted.ids.slice_of(server)] for wanted in mine]
        more = {"ahead": [wanted.table for wanted in mine], "reports": push.reports}
        extended[server] = msgspec.structs.replace(message, **more), [*arrays, *ids]
    return extended
