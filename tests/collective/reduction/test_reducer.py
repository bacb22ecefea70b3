# SPDX-License-Identifier: Apache-2.0
"""The reducer and reductions in flight when the job is left."""

import weakref
from typing import Any

import pytest
import torch
from tests.collective.doubles import Slow
from torch.futures import Future

from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp


class Failing(Slow):
    """A route whose buckets are lost."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.lost: Future[Any] = Future()
        self.lost.set_exception(RuntimeError(f"bucket {bucket.index} is lost"))  # type: ignore[arg-type]
        return self.lost


def test_a_bucket_in_flight_holds_no_process_group() -> None:
    """A thread of the process group that frees it last would wait for itself."""
    reducer = Reducer(2, [], route=Slow())
    future = reducer.reduce(Bucket(0, torch.ones(3)))
    freed = weakref.ref(reducer)
    del reducer
    assert freed() is None
    assert not future.done()


def test_the_first_failure_is_raised_once() -> None:
    reducer = Reducer(2, [], route=Failing())
    started = [reducer.reduce(Bucket(index, torch.ones(3))) for index in range(2)]
    with pytest.raises(RuntimeError, match="bucket 0 is lost"):
        reducer.settle(started)
    reducer.settle(started)
