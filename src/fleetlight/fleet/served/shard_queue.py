# SPDX-License-Identifier: Apache-2.0
"""`ServedDealer`: server 0 deals out the records of a loader, range by range.

Whoever trains faster asks more often. What a worker has in hand that is lost, or leaves, is dealt
out to others.
"""

from __future__ import annotations

from typing import Any

from fleetlight.data.order import Interval
from fleetlight.data.ranges import Ask, Place, Queue
from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.fleet.context import Context
from fleetlight.fleet.served.session import Session
from fleetlight.ps import messages as m
from fleetlight.ps.plan import SYNC
from fleetlight.ps.worker.lanes import CONTROL

#: how records can be dealt out
DEALS = ("blocks", "queue")
#: the server that deals out
_SERVER = 0


class ServedDealer:
    """For one loader, by its number: the same on all workers, who make the same calls."""

    def __init__(self, context: Context, loader: int) -> None:
        self._context, self._loader = context, loader

    def deal(self, ask: Ask) -> Interval | None:
        """As in `Dealer`."""
        message = m.Deal(
            self._loader,
            ask.turn,
            ask.epoch,
            ask.number,
            ask.reached,
            ask.back,
            list(ask.whole),
            ask.unit,
            ask.batches,
            ask.waits,
        )
        told = self._told(message)
        return (told.start, told.stop) if isinstance(told, m.Dealt) else None

    def reached(self, turn: int, place: Place, *, gives_back: bool) -> None:
        """As in `Dealer`."""
        if self._is_here():
            self._told(m.Reached(self._loader, turn, place, gives_back))

    def remaining(self, turn: int) -> list[Interval] | None:
        """As in `Dealer`."""
        told = self._told(m.Remain(self._loader, turn))
        assert isinstance(told, m.Remaining), told
        return told.ranges

    def steps(self) -> tuple[int, int]:
        """As in `Dealer`."""
        session = self._context.session
        if session is None or not session.is_open:
            return 0, 0
        return session.communicator.made, session.communicator.acknowledged

    def settle(self) -> None:
        """As in `Dealer`."""
        if self._is_here():
            self._session().communicator.settle()

    def resume(self) -> None:
        """As in `Dealer`."""
        if self._is_here():
            self._session().communicator.resume()

    def reopen(self) -> None:
        """As in `Dealer`."""
        if self._is_here():
            self._session().communicator.reopen()

    def _is_here(self) -> bool:
        """False once this worker has left: a loop may end later than the job."""
        session = self._context.session
        return session is not None and not (session.is_over or session.has_left)

    def _told(self, message: m.Message) -> m.Message:
        return self._session().client.ask(CONTROL, {_SERVER: (message, ())})[_SERVER].message

    def _session(self) -> Session:
        session = self._context.session
        if session is None:
            raise ConfigError(
                "a loader with deal='queue' was read in a server; servers do not train"
            )
        if not session.is_open:
            session.open(self._context)
        _check_mode(session)
        return session

    def __reduce__(self) -> Any:
        # a loader sent to a loading process takes no part in the job there
        return _nobody, ()


def queue_of(context: Context, deal: str, range_batches: int) -> Queue | None:
    """How the next loader is dealt out on demand, if it is."""
    if deal not in DEALS:
        raise ConfigError(f"fleet.shard: got {deal=}; {did_you_mean(deal, DEALS)}")
    if deal == "blocks":
        return None
    if not context.is_served:
        raise ConfigError(
            "fleet.shard: deal='queue' is for jobs with parameter servers and a_sync=True; in a "
            "collective job all workers make each step together, so all need as many batches: "
            "leave deal out"
        )
    return Queue(ServedDealer(context, len(context.loaders)), range_batches)


def positions(context: Context) -> list[dict[str, Any]]:
    """Of the loaders, for a checkpoint: those that worker 0 knows are everybody's."""
    if context.group.index == 0 and not context.is_catching_up:
        return [loader.shared_state() for loader in context.loaders]
    return [loader.state_dict() for loader in context.loaders]


def tell_positions(context: Context) -> None:
    """Let server 0 know what this worker has done; all its steps are with the servers."""
    if not context.is_catching_up:
        for loader in context.loaders:
            loader.tell()


def _check_mode(session: Session) -> None:
    plan = session.drawn.plan
    if plan.mode == SYNC or not plan.serves_dense:
        how = "in sync mode" if plan.mode == SYNC else "with dense='allreduce'"
        raise ConfigError(
            f"fleet.shard: got deal='queue', but {how} all workers make each step together, so all "
            "need as many batches; leave deal out, or train with a_sync=True and dense='servers'"
        )


def _nobody() -> None:
    return None
