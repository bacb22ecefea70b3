# SPDX-License-Identifier: Apache-2.0
"""A detour through main memory: sums come back to where the values were."""

from __future__ import annotations

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
    """A route whose sums are there when it is finished."""

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


def test_the_sum_comes_back() -> None:
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


def test_only_what_may_be_coded_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "in_main_memory", lambda tensor: False)
    route = Doubling()
    reducer = Reducer(2, [], route=route)
    coded, plain = torch.ones(3), torch.ones(3)
    future = reducer.reduce(Bucket(0, coded, PARTS))
    # process groups take what is on a GPU; there are none here
    with pytest.raises(ZeroDivisionError):
        reducer.reduce(Bucket(1, plain))
    reducer.finish()
    # half of it, twice
    assert future.wait().tolist() == [1.0] * 3
    assert [bucket.parts for bucket, _ in route.started] == [PARTS]
