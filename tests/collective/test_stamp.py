# SPDX-License-Identifier: Apache-2.0
"""Positions: differences are detected, and every route transmits them exactly."""

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


def test_a_stamp_survives_packing() -> None:
    for stamp in (GradientStamp(FAR, 2**32 - 1), GradientStamp(UNKNOWN, 7), BLANK):
        assert len(stamp.packed()) == PACKED_BYTES
        assert GradientStamp.unpacked(stamp.packed()) == stamp


def test_equal_or_unknown_positions_are_accepted() -> None:
    check_equally_far({})
    check_equally_far({0: FAR, 1: FAR})
    check_equally_far({0: UNKNOWN, 1: FAR, 2: FAR})


def test_different_positions_are_named() -> None:
    positions = {0: Position(1, 8), 1: Position(0, 64), 2: Position(1, 8), 3: UNKNOWN}
    with pytest.raises(DivergedError) as caught:
        check_equally_far(positions)
    assert "worker 1 at 64 of epoch 0, workers 0, 2 at 8 of epoch 1. If one" in str(caught.value)
    with pytest.raises(DivergedError, match=r"workers 0, 1, 2, 3, 4, 5, 6, 7 \.\.\. at 8"):
        check_equally_far({**{i: Position(0, 8) for i in range(9)}, 9: FAR})


def through_process_groups(dtype: torch.dtype) -> list[bool]:
    group = current().group
    reducer = Reducer(group.size, group.communicators(2))
    diverged = []
    for mine in (FAR, Position(0, group.index)):
        reducer.stamp = GradientStamp(mine)
        buckets = [Bucket(i, torch.ones(3, dtype=dtype)) for i in range(3)]
        for future in [reducer.reduce(bucket) for bucket in buckets]:
            future.wait()
        assert all(bool((bucket.buffer == 1).all()) for bucket in buckets)
        try:
            check_equally_far({i: stamp.position for i, stamp in reducer.stamps().items()})
        except DivergedError:
            diverged.append(True)
        else:
            diverged.append(False)
    return diverged


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_gradient_type_carries_positions(dtype: torch.dtype) -> None:
    assert run_workers(through_process_groups, 2, dtype) == [[False, True]] * 2
