# SPDX-License-Identifier: Apache-2.0
"""The route by levels: pieces overlap on their way up, totals come down, failures are told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.routes import hierarchy
from fleetlight.collective.routes.exchange import GroupRotation, PlainExchange
from fleetlight.collective.routes.hierarchy import Hierarchy
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.route_segments import SegmentPlace
from fleetlight.collective.stamp import GradientStamp, Position

STAMP = GradientStamp(Position(1, 7), 9)


class Sent:
    """An all-reduce of the leaders that is on its way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.waited = False

    def wait(self) -> None:
        self.waited = True
        if self.tensor.dtype != torch.uint8:
            self.tensor.mul_(10)


class Leaders:
    """A process group of leaders that takes down what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[Sent] = []
        self.came = threading.Event()
        self._error = error

    def allreduce(self, tensors: list[Tensor]) -> Sent:
        (tensor,) = tensors
        if self._error is not None and tensor.dtype != torch.uint8:
            raise self._error
        self.sent.append(Sent(tensor))
        if tensor.dtype != torch.uint8:
            self.came.set()
        return self.sent[-1]


class Doubling:
    """A level of which this worker is the leader; the others bring the same."""

    def __init__(self, said: list[str], name: str) -> None:
        self._said, self._name = said, name
        self._sums: list[Tensor] = []

    def up(self, tensor: Tensor) -> Tensor | None:
        self._said.append(f"{self._name} up")
        self._sums.append(tensor * 2 if tensor.dtype != torch.uint8 else tensor.clone())
        return self._sums[-1]

    def down(self, tensor: Tensor) -> None:
        self._said.append(f"{self._name} down")
        tensor.copy_(self._sums.pop(0))

    def end_round(self) -> None:
        assert not self._sums
        self._said.append(f"{self._name} end")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self._said.append(f"{self._name} closed")


def route(levels: list[Any], leaders: list[Any]) -> Hierarchy:
    return Hierarchy(1, 2, levels, PlainExchange(GroupRotation(leaders)))


def test_a_tensor_goes_up_level_by_level_and_comes_down_the_same_way() -> None:
    said: list[str] = []
    made = route([Doubling(said, "a"), Doubling(said, "b")], [Leaders()])
    tensor = torch.ones(2, 3)
    future = made.start(Bucket(0, tensor), STAMP)
    made.finish()
    assert future.done()
    assert torch.equal(tensor, torch.full((2, 3), 40.0))
    assert made.stamps() == {0: GradientStamp(Position(0, 0), 0), 1: STAMP}
    assert made.stamps() == {}
    # the stamps go the same way
    assert said[:-2] == ["a up", "b up"] * 2 + ["b down", "a down"] * 2
    made.close()
    assert said[-4:] == ["a end", "b end", "a closed", "b closed"]


def test_a_round_ends_once_however_often_it_is_waited_for() -> None:
    said: list[str] = []
    made = route([Doubling(said, "a")], [Leaders()])
    made.finish()
    made.start(Bucket(0, torch.ones(3)), STAMP)
    made.finish()
    made.finish()
    made.close()
    assert said.count("a end") == 1


def test_pieces_are_on_the_network_before_anybody_waits() -> None:
    leaders = Leaders()
    made = route([Doubling([], "a")], [leaders])
    made.start(Bucket(0, torch.ones(3)), STAMP)
    # backward would go on now
    assert leaders.came.wait(timeout=60)
    assert not any(sent.waited for sent in leaders.sent)
    made.finish()
    assert all(sent.waited for sent in leaders.sent)
    made.close()


def test_large_tensors_go_in_pieces_and_process_groups_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 64)
    one, other = Leaders(), Leaders()
    made = route([Doubling([], "a")], [one, other])
    tensors = [torch.ones(50), torch.ones(0), torch.ones(7, dtype=torch.float64)]
    futures = [made.start(Bucket(i, tensor), STAMP) for i, tensor in enumerate(tensors)]
    made.finish()
    assert all(future.done() for future in futures)
    assert all(bool((tensor == 20).all()) for tensor in tensors)
    sizes = [[sent.tensor.numel() for sent in leaders.sent] for leaders in (one, other)]
    # the stamps of two workers are 40 bytes
    assert sizes == [[40, 16, 2], [16, 16, 7]]
    made.close()


class Coded:
    """An exchange that takes down what it is asked for; sums are 100 times as large."""

    def __init__(self) -> None:
        self.places: list[SegmentPlace] = []
        self.said: list[str] = []

    def start(self, tensor: Tensor, place: SegmentPlace) -> CodedShot:
        self.places.append(place)
        self.said.append("start")
        return CodedShot(self, tensor)

    def close(self) -> None:
        self.said.append("close")


class CodedShot:
    def __init__(self, by: Coded, tensor: Tensor) -> None:
        self._by, self._tensor = by, tensor

    def advance(self) -> None:
        self._by.said.append("go on")

    def wait(self) -> None:
        self._by.said.append("wait")
        self._tensor.mul_(100)


def test_what_may_be_coded_takes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 64)
    leaders, coded = Leaders(), Coded()
    made = Hierarchy(1, 2, [Doubling([], "a")], PlainExchange(GroupRotation([leaders])), coded)  # type: ignore[list-item]
    parts = (ParameterSlice("w", 20), ParameterSlice("v", 20))
    plain, other = torch.ones(3), torch.ones(40)
    made.start(Bucket(0, plain), STAMP)
    made.start(Bucket(1, other, parts), STAMP)
    made.finish()
    assert plain.tolist() == [20.0] * 3
    assert other.tolist() == [200.0] * 40
    assert coded.places == [
        SegmentPlace(parts, 0),
        SegmentPlace(parts, 16),
        SegmentPlace(parts, 32),
    ]
    # nothing comes down before all is on its way
    assert coded.said[-3:] == ["wait"] * 3
    made.close()
    assert coded.said[-1] == "close"


def test_a_worker_that_leads_nowhere_sends_nothing() -> None:
    class Follower(Doubling):
        def up(self, tensor: Tensor) -> Tensor | None:
            super().up(tensor)
            return None

    made = route([Follower([], "a")], [])
    tensor = torch.ones(3)
    made.start(Bucket(0, tensor), STAMP)
    made.finish()
    assert torch.equal(tensor, torch.full((3,), 2.0))
    made.close()


def test_a_failure_on_the_way_up_is_raised_where_it_is_waited_for_and_stays() -> None:
    made = route([], [Leaders(RuntimeError("connection closed"))])
    for _ in range(2):
        future = made.start(Bucket(0, torch.ones(3)), STAMP)
        with pytest.raises(RuntimeError, match="connection closed"):
            made.finish()
        assert future.done()
    made.close()


def test_closing_in_the_middle_ends_the_thread() -> None:
    class Stuck(Doubling):
        def __init__(self) -> None:
            super().__init__([], "stuck")
            self.entered, self.free = threading.Event(), threading.Event()

        def up(self, tensor: Tensor) -> Tensor | None:
            self.entered.set()
            assert self.free.wait(timeout=60)
            raise RuntimeError("interrupted")

        def interrupt(self) -> None:
            self.free.set()

    stuck = Stuck()
    made = route([stuck], [])
    made.start(Bucket(0, torch.ones(3)), STAMP)
    assert stuck.entered.wait(timeout=60)
    made.close()
    assert not made._thread.is_alive()
