# SPDX-License-Identifier: Apache-2.0
"""The state of torch's rendezvous as JSON in the launchers' store.

torch would put a pickle there and unpickle whatever it finds: the store checks nobody, and anyone
who reached it could run code in every launcher. So what travels is data. Only bytes that this very
process has pickled a moment ago are ever unpickled: torch takes the state in no other form.
"""

from __future__ import annotations

import datetime
import pickle
from typing import Any, NamedTuple, Protocol

import msgspec


class _Node(NamedTuple):
    addr: str
    pid: int
    local_id: int


class _Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of torch's `_RendezvousState`, by their names."""

    round: int
    complete: bool
    deadline: datetime.datetime | None
    closed: bool
    participants: list[tuple[_Node, int]]
    wait_list: list[_Node]
    redundancy_list: list[_Node]
    last_heartbeats: list[tuple[_Node, datetime.datetime]]


class RendezvousBackend(Protocol):
    """The part of torch's `RendezvousBackend` that we stand in for; a token is torch's own mark."""

    @property
    def name(self) -> str:
        """What torch calls it."""

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its mark, None before there is one."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state with that mark; what is there then, and whether it is the new one."""


class JsonBackend:
    """Between torch, which speaks pickle, and a store in which there is none."""

    def __init__(self, inner: RendezvousBackend, torch: Any) -> None:
        """`torch` is the module of the rendezvous, with its classes and errors."""
        self._inner, self._torch = inner, torch
        #: the round of the last state that was read or written
        self.round = 0

    @property
    def name(self) -> str:
        """What torch calls it."""
        return self._inner.name

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, pickled here, and its mark."""
        found = self._inner.get_state()
        return None if found is None else (self._pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that has the mark `token`."""
        # torch has pickled it in the line before it called this
        plain = pickle.loads(state)
        answer = self._inner.set_state(to_json(plain), token)
        if answer is None:
            return None
        data, mark, has_set = answer
        if not has_set:
            return self._pickled(data), mark, False
        self.round = plain.round
        return state, mark, True

    def _pickled(self, data: bytes) -> bytes:
        try:
            plain = from_json(data, self._torch)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise self._torch.RendezvousStateError(
                f"the launchers' store holds something that is no state of a rendezvous ({error}); "
                "is another version of fleetlight, or another program, using this port?"
            ) from None
        self.round = plain.round
        return pickle.dumps(plain)


def to_json(state: Any) -> bytes:
    """A state of torch's as data; equal states give equal bytes."""
    return msgspec.json.encode(
        _Round(
            round=state.round,
            complete=state.complete,
            deadline=state.deadline,
            closed=state.closed,
            participants=[(_node(node), rank) for node, rank in state.participants.items()],
            wait_list=sorted(map(_node, state.wait_list)),
            redundancy_list=sorted(map(_node, state.redundancy_list)),
            last_heartbeats=[(_node(node), at) for node, at in state.last_heartbeats.items()],
        )
    )


def from_json(data: bytes, torch: Any) -> Any:
    """The way back, into torch's own classes."""
    # loads torch, which a job of one machine has no use for
    from fleetlight.torch_compat.c10d import empty_rendezvous_state, rendezvous_node

    read = msgspec.json.decode(data, type=_Round)
    state = empty_rendezvous_state(torch)
    state.round, state.complete, state.closed = read.round, read.complete, read.closed
    state.deadline = read.deadline
    state.participants = {rendezvous_node(torch, *one): rank for one, rank in read.participants}
    state.wait_list = {rendezvous_node(torch, *one) for one in read.wait_list}
    state.redundancy_list = {rendezvous_node(torch, *one) for one in read.redundancy_list}
    state.last_heartbeats = {rendezvous_node(torch, *one): at for one, at in read.last_heartbeats}
    return state


def _node(node: Any) -> _Node:
    return _Node(node.addr, node.pid, node.local_id)
