# SPDX-License-Identifier: Apache-2.0
"""Positions: the same everywhere or told, and exact however they travel."""

from __future__ import annotations

import pytest
import torch
from tests.workers import run_workers

from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import (
    BLANK,
    PACKED_BYTES,
    UNKNOWN,
    GradientStamp,
    Position,
    check_equally_far,
)
from fleetlight.errors import DivergedError
from fleetlight.fleet.job import current

FAR = Position(2**40 + 7, 2**62 + 1)


def test_a_stamp_is_packed_and_unpacked() -> None:
    for stamp in (GradientStamp(FAR, 2**32 - 1), GradientStamp(UNKNOWN, 7), BLANK):
        assert len(stamp.packed()) == PACKED_BYTES
        assert GradientStamp.unpacked(stamp.packed()) == stamp


def test_workers_at_one_position_or_without_one_are_equally_far() -> None:
    check_equally_far({})
    check_equally_far({0: FAR, 1: FAR})
    check_equally_far({0: UNKNOWN, 1: FAR, 2: FAR})


def test_who_is_where_is_told() -> None:
    positions = {0: Position(1, 8), 1: Position(0, 64), 2: Position(1, 8), 3: UNKNOWN}
    with pytest.raises(DivergedError) as caught:
        check_equally_far(positions)
    assert "worker 1 at 64 of epoch 0, workers 0, 2 at 8 of epoch 1. A batch" in str(caught.value)
    with pytest.raises(DivergedError, match=r"workers 0, 1, 2, 3, 4, 5, 6, 7 \.\.\. at 8"):
        check_equally_far({**{i: Position(0, 8) for i in range(9)}, 9: FAR})


def through_process_groups(dtype: torch.dtype) -> list[bool]:
    group = current().group
    reducer = Reducer(group.size, group.communicators(2))
    told = []
    for mine in (FAR, Position(0, group.index)):
        reducer.stamp = GradientStamp(mine)
        buckets = [Bucket(i, torch.ones(3, dtype=dtype)) for i in range(3)]
        for future in [reducer.reduce(bucket) for bucket in buckets]:
            future.wait()
        assert all(bool((bucket.buffer == 1).all()) for bucket in buckets)
        try:
            check_equally_far({i: stamp.position for i, stamp in reducer.stamps().items()})
        except DivergedError:
            told.append(True)
        else:
            told.append(False)
    return told


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_of_gradient_brings_positions_along(dtype: torch.dtype) -> None:
    assert run_workers(through_process_groups, 2, dtype) == [[False, True]] * 2
