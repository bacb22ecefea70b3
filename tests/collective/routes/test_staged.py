# SPDX-License-Identifier: Apache-2.0
"""Staging through main memory: sums return to the buffer of the values."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.reduction import reducer as reducing
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket, Staged
from fleetlight.collective.stamp import BLANK, GradientStamp


class Doubling:
    """A route that doubles buckets in finish()."""

    def __init__(self) -> None:
        self.started: list[tuple[Bucket, Future[Any]]] = []

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.started.append((bucket, Future()))
        return self.started[-1][1]

    def finish(self) -> None:
        for bucket, future in self.started:
            bucket.buffer.mul_(2)
            future.set_result(bucket.buffer)

    def stamps(self) -> Mapping[int, GradientStamp]:
        return {0: BLANK}

    def close(self) -> None:
        self.started.clear()


PARTS = (ParameterSlice("a", 3),)


def test_the_sum_returns_to_the_buffer() -> None:
    route = Doubling()
    staged, buffer = Staged(route), torch.ones(3)
    future = staged.start(Bucket(7, buffer, PARTS, True), BLANK)
    [(sent, _)] = route.started
    assert (sent.index, sent.parts, sent.is_exact) == (7, PARTS, True)
    assert sent.buffer.data_ptr() != buffer.data_ptr()
    assert not future.done()
    staged.finish()
    assert future.value() is buffer
    assert buffer.tolist() == [2.0] * 3
    assert staged.stamps() == {0: BLANK}
    staged.close()
    assert not route.started


def test_only_codable_buckets_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "in_main_memory", lambda tensor: False)
    route = Doubling()
    reducer = Reducer(2, [], route=route)
    coded, plain = torch.ones(3), torch.ones(3)
    future = reducer.reduce(Bucket(0, coded, PARTS))
    # process groups reduce tensors on a GPU; there are none here
    with pytest.raises(ZeroDivisionError):
        reducer.reduce(Bucket(1, plain))
    reducer.finish()
    # halved, then doubled
    assert future.wait().tolist() == [1.0] * 3
    assert [bucket.parts for bucket, _ in route.started] == [PARTS]
