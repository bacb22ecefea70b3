# SPDX-License-Identifier: Apache-2.0
"""The state of torch's rendezvous as JSON in the launchers' store.

torch would store a pickle and unpickle what it finds. The store has no authentication, so anyone
who reaches it could run code in every launcher. JSON is data only. torch takes the state as a
pickle, so this module unpickles bytes, but only those that this process has just pickled.
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
    """The methods of torch's `RendezvousBackend`; a token identifies a version of the state."""

    @property
    def name(self) -> str:
        """The name that torch logs."""

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its token, None before the first write."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Compare and swap; return the current state, its token, and True if it is `state`."""


class JsonBackend:
    """Translates between torch's pickle and the store's JSON."""

    def __init__(self, inner: RendezvousBackend, torch: Any) -> None:
        """`torch` is the module with the rendezvous' classes and errors."""
        self._inner, self._torch = inner, torch
        #: the round of the last state that was read or written
        self.round = 0

    @property
    def name(self) -> str:
        """The name that torch logs."""
        return self._inner.name

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state as a pickle, and its token."""
        found = self._inner.get_state()
        return None if found is None else (self._pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that has this token."""
        # torch pickles the state just before this call
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
                f"the launchers' store has invalid data in place of a rendezvous state ({error}); "
                "does another version of fleetlight, or another program, use this port?"
            ) from None
        self.round = plain.round
        return pickle.dumps(plain)


def to_json(state: Any) -> bytes:
    """Encode torch's state; equal states give equal bytes."""
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
    """Decode a state into torch's classes."""
    # imported late, because a job of one machine does not need torch
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
