# SPDX-License-Identifier: Apache-2.0
"""Leaders sum pieces plainly, in a narrow type, or by messages of a codec."""

from typing import Any

import pytest
import torch
from tests.collective.rounding import rounded
from tests.workers import run_workers
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.collective.routes.exchange import (
    AllGatherExchange,
    Exchange,
    GroupRotation,
    MessagePool,
    PlainExchange,
    TwoShotExchange,
)
from fleetlight.collective.routes.route_segments import SegmentPlace
from fleetlight.fleet.job import current

#: several pieces, of which the last is too small for three chunks
PIECES = (2000, 1000, 40)
PARTS = (ParameterSlice("a", 1500), ParameterSlice("b", 1540))
ROUNDS = 3


def test_returned_messages_are_reused() -> None:
    messages = MessagePool()
    one, other = messages.take(2, 8), messages.take(2, 8)
    assert one.data_ptr() != other.data_ptr()
    messages.give_back(one)
    again = messages.take(3, 4)
    assert again.data_ptr() == one.data_ptr()
    assert again.shape == (3, 4)
    assert messages.take(1, 8).data_ptr() != other.data_ptr()


def test_the_pool_uses_the_best_fit_and_frees_outgrown_memory() -> None:
    messages = MessagePool()
    small, large = messages.take(1, 8), messages.take(1, 32)
    messages.give_back(large, small)
    addresses = small.data_ptr(), large.data_ptr()
    assert messages.take(2, 4).data_ptr() == addresses[0]
    assert messages.take(2, 5).data_ptr() == addresses[1]
    # growing messages leave no unused memory
    for length in range(50, 60):
        messages.give_back(messages.take(1, length))
    assert [len(memory) for memory in messages._free] == [59]


def groups(count: int) -> list[Any]:
    group = current().group
    return group.acquire((tuple(range(group.size)),), count)  # type: ignore[union-attr]


def make_exchange(kind: str) -> tuple[Exchange, ErrorFeedback | None]:
    """An exchange of this kind; coded ones also have error feedback."""
    turns = GroupRotation(groups(2))
    if kind in ("plain", "bf16"):
        return PlainExchange(turns, torch.bfloat16 if kind == "bf16" else None), None
    compression = rounded(divisible=kind == "two shots")
    if kind == "gathered":
        return AllGatherExchange(turns, compression), compression.residuals
    return TwoShotExchange(turns, GroupRotation(groups(1)), compression), compression.residuals


def values_of(index: int, round_: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * round_ + index)
    return torch.randn(sum(PIECES), generator=generator)


def summed(kind: str) -> tuple[list[Tensor], Tensor]:
    """The totals of each round, and the final residual of this worker."""
    index, totals = current().group.index, []
    exchange, feedback = make_exchange(kind)
    for round_ in range(ROUNDS):
        bucket, place, shots = values_of(index, round_), SegmentPlace(PARTS), []
        for piece in bucket.split(list(PIECES)):
            shots.append(exchange.start(piece, place))
            place = place.after(piece.numel())
        for shot in shots:
            shot.advance()
        for shot in shots:
            shot.wait()
        totals.append(bucket)
    kept = [feedback.of(kind, PARTS) for kind in ("owed", "owed again")] if feedback else []
    residual = sum(kept, torch.zeros(sum(PIECES)))
    exchange.close()
    return totals, residual


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("two shots", 3), ("plain", 2), ("bf16", 2), ("gathered", 2), ("gathered", 3)],
    ids=["two-shots-3", "plain", "bf16", "gathered-2", "gathered-3"],
)
def test_totals_plus_residuals_are_the_sum(kind: str, workers: int) -> None:
    results = run_workers(summed, workers, kind)
    true = [torch.stack([values_of(i, r) for i in range(workers)]).sum(0) for r in range(ROUNDS)]
    for totals, _ in results:
        for total, first, right in zip(totals, results[0][0], true, strict=True):
            # bit for bit
            assert torch.equal(total, first)
            digits = 1e-6 if kind == "plain" else 0.06
            torch.testing.assert_close(total, right, rtol=0, atol=digits)
    if "bf16" not in kind:
        sent = torch.stack(results[0][0]).sum(0)
        residual = torch.stack([mine for _, mine in results]).sum(0)
        assert kind == "plain" or residual.abs().max() > 1e-4
        torch.testing.assert_close(sent + residual, torch.stack(true).sum(0), rtol=0, atol=1e-5)
