# SPDX-License-Identifier: Apache-2.0
"""What a job does that was killed as a whole, by what its processes have left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.resume import (
    BEGINNING,
    FINISHED,
    KEPT,
    LEFT,
    NOTHING,
    OVER,
    POSITIONS,
    REFUSED,
    STARTED,
    STEPPED,
    UNABLE,
    VALUES,
    Decision,
    Remains,
    Report,
    check_beginning,
    check_mark,
    decide,
)


def left(state: str, job: str = "j", start: int = 0) -> Remains:
    return Remains() if state == NOTHING else Remains(state, job, start)


def decided(
    servers: Sequence[str | Remains],
    workers: Sequence[str | Remains],
    *,
    checkpoint: int | None = None,
    step: int = 10,
) -> Decision:
    there = [left(one) if isinstance(one, str) else one for one in servers]
    mine = [left(one) if isinstance(one, str) else one for one in workers]
    why = "its batches are its own"
    return decide([Report(one, there, why, step, checkpoint) for one in mine])


@pytest.mark.parametrize(
    ("servers", "workers", "kind"),
    [
        ([KEPT, KEPT], [STEPPED, STEPPED], POSITIONS),
        # the others had got further than it
        ([KEPT, KEPT], [STEPPED, STARTED], POSITIONS),
        # some or all had left, and the servers know
        ([KEPT, KEPT], [STEPPED, LEFT], POSITIONS),
        ([KEPT, KEPT], [LEFT, LEFT], POSITIONS),
        # all had left at least one server, which has ended
        ([OVER, KEPT], [STEPPED, LEFT], FINISHED),
        ([OVER, OVER], [STEPPED, LEFT], FINISHED),
        ([OVER, OVER], [LEFT, LEFT], REFUSED),
        ([NOTHING, NOTHING], [NOTHING, STARTED], REFUSED),
        ([KEPT, NOTHING], [NOTHING, STARTED], BEGINNING),
        ([KEPT, KEPT], [NOTHING, NOTHING], BEGINNING),
        ([KEPT, NOTHING], [STEPPED, STEPPED], REFUSED),
        ([NOTHING, NOTHING], [STEPPED, STEPPED], REFUSED),
        ([KEPT, KEPT], [STEPPED, NOTHING], REFUSED),
        ([KEPT, KEPT], [STEPPED, UNABLE], VALUES),
        ([KEPT, KEPT], [UNABLE, UNABLE], VALUES),
    ],
)
def test_it_resumes_where_each_worker_was_if_everything_is_there(
    servers: list[str], workers: list[str], kind: str
) -> None:
    found = decided(servers, workers)
    assert found.kind == kind
    assert found.keeps_workers == (kind in (POSITIONS, FINISHED))
    with_checkpoint = decided(servers, workers, checkpoint=7)
    falls_back = kind in (REFUSED, BEGINNING)
    assert with_checkpoint.kind == (VALUES if falls_back else kind)
    # nothing is said where nothing was lost
    assert bool(with_checkpoint.why) == (with_checkpoint.kind == VALUES and kind != BEGINNING)


def test_the_newest_of_log_and_checkpoint_counts() -> None:
    both = [KEPT], [STEPPED]
    # a checkpoint that was saved after the last step has counted it
    assert decided(*both, step=10, checkpoint=11).kind == POSITIONS
    found = decided(*both, step=10, checkpoint=12)
    assert (found.kind, found.why) == (
        VALUES,
        "the checkpoint (step 12) is newer than the log (step 11)",
    )


def test_what_is_refused_says_what_is_missing() -> None:
    assert "nothing to resume from; restore" in decided([NOTHING], [NOTHING]).why
    assert "has ended well" in decided([OVER], [LEFT]).why
    assert "the folder of server 1 is empty" in decided([KEPT, NOTHING], [STEPPED]).why
    assert "the folder of worker 1 is empty" in decided([KEPT], [STEPPED, NOTHING]).why
    why = "worker 1 cannot resume where it was: its batches are its own"
    assert decided([KEPT], [STEPPED, UNABLE]).why == why


def test_folders_of_other_jobs_and_earlier_starts_hold_nothing() -> None:
    old = left(STEPPED, "old")
    assert decided([KEPT], [STEPPED, old]).kind == REFUSED
    # all were about to restart
    begun = decided([left(KEPT, start=1), left(KEPT)], [left(STEPPED), left(STARTED, start=1)])
    assert (begun.kind, begun.job, begun.start) == (BEGINNING, "j", 1)
    # where another job has ended before
    assert decided([left(OVER, "old"), KEPT], [STARTED, left(LEFT, "old")]).kind == BEGINNING
    mixed = decided([KEPT, left(KEPT, "old")], [STEPPED])
    assert (mixed.kind, "different jobs" in mixed.why) == (REFUSED, True)


def test_nobody_begins_at_the_beginning_with_trained_values() -> None:
    check_beginning(Decision(BEGINNING), pushes=0)
    check_beginning(Decision(POSITIONS), pushes=3)
    with pytest.raises(JournalError, match="whose folders are empty; restore"):
        check_beginning(Decision(BEGINNING), pushes=3)


@pytest.mark.parametrize(
    ("mark", "fits"), [(6, False), (7, True), (9, True), (10, True), (11, False)]
)
def test_a_server_has_what_it_acknowledged_and_no_more(mark: int, fits: bool) -> None:
    """Pushes 8 and 9 were about to leave, and the server holds one that is not written down."""
    assert (not check_mark(mark, sent=9, requests=2, held=1)) == fits
