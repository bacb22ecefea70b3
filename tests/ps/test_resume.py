# SPDX-License-Identifier: Apache-2.0
"""How a job resumes after all its processes were killed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import JournalError, ProtocolError
from fleetlight.ps.high_water_marks import HighWaterMarks
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

# The decision how a job resumes after all its processes were killed.


def left(state: str, job: str = "j", start: int = 0) -> Remains:
    return Remains() if state == NOTHING else Remains(state, job, start)


def decided(
    servers: Sequence[str | Remains],
    workers: Sequence[str | Remains],
    *,
    checkpoint: int | None = None,
    step: int = 10,
    may_begin: bool = False,
) -> Decision:
    of_servers = [left(s) if isinstance(s, str) else s for s in servers]
    of_workers = [left(w) if isinstance(w, str) else w for w in workers]
    why = "its batches are its own"
    return decide([Report(one, of_servers, why, step, checkpoint, may_begin) for one in of_workers])


@pytest.mark.parametrize(
    ("servers", "workers", "kind"),
    [
        ([KEPT, KEPT], [STEPPED, STEPPED], POSITIONS),
        # worker 0 is further than worker 1
        ([KEPT, KEPT], [STEPPED, STARTED], POSITIONS),
        # some or all workers left, and the servers recorded it
        ([KEPT, KEPT], [STEPPED, LEFT], POSITIONS),
        ([KEPT, KEPT], [LEFT, LEFT], POSITIONS),
        # all workers left server 0, which has ended
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
def test_job_resumes_at_last_steps_if_all_folders_allow_it(
    servers: list[str], workers: list[str], kind: str
) -> None:
    found = decided(servers, workers)
    assert found.kind == kind
    assert found.keeps_workers == (kind in (POSITIONS, FINISHED))
    with_checkpoint = decided(servers, workers, checkpoint=7)
    falls_back = kind in (REFUSED, BEGINNING)
    assert with_checkpoint.kind == (VALUES if falls_back else kind)
    # no reason is given if nothing was lost
    assert bool(with_checkpoint.why) == (with_checkpoint.kind == VALUES and kind != BEGINNING)


def test_the_newer_of_log_and_checkpoint_wins() -> None:
    both = [KEPT], [STEPPED]
    # a checkpoint saved after the last step includes it
    assert decided(*both, step=10, checkpoint=11).kind == POSITIONS
    found = decided(*both, step=10, checkpoint=12)
    assert (found.kind, found.why) == (
        VALUES,
        "the checkpoint (step 12) is newer than the log (step 11)",
    )


def test_refusals_name_what_is_missing() -> None:
    assert "nothing to resume from; restore" in decided([NOTHING], [NOTHING]).why
    assert "has ended well" in decided([OVER], [LEFT]).why
    assert "the folder of server 1 is empty" in decided([KEPT, NOTHING], [STEPPED]).why
    assert "the folder of worker 1 is empty" in decided([KEPT], [STEPPED, NOTHING]).why
    why = "worker 1 cannot resume where it was: its batches are its own"
    assert decided([KEPT], [STEPPED, UNABLE]).why == why


def test_folders_of_other_jobs_and_earlier_starts_do_not_count() -> None:
    assert decided([KEPT], [STEPPED, left(STEPPED, "old")]).kind == REFUSED
    # a restart of all processes was interrupted
    begun = decided([left(KEPT, start=1), left(KEPT)], [left(STEPPED), left(STARTED, start=1)])
    assert (begun.kind, begun.job, begun.start) == (BEGINNING, "j", 1)
    # these folders still have the state of an older job that ended
    assert decided([left(OVER, "old"), KEPT], [STARTED, left(LEFT, "old")]).kind == BEGINNING
    mixed = decided([KEPT, left(KEPT, "old")], [STEPPED])
    assert (mixed.kind, "different jobs" in mixed.why) == (REFUSED, True)


def test_job_does_not_start_over_with_trained_values() -> None:
    check_beginning(Decision(BEGINNING), pushes=0)
    check_beginning(Decision(POSITIONS), pushes=3)
    with pytest.raises(JournalError, match="whose folders are empty; restore"):
        check_beginning(Decision(BEGINNING), pushes=3)


@pytest.mark.parametrize(
    ("mark", "fits"), [(6, False), (7, True), (9, True), (10, True), (11, False)]
)
def test_check_mark_accepts_unacknowledged_and_held_pushes(mark: int, fits: bool) -> None:
    """Pushes 8 and 9 are logged but unacknowledged, and the server holds one more."""
    assert (not check_mark(mark, sent=9, requests=2, held=1)) == fits


@pytest.mark.parametrize(
    ("servers", "workers"),
    [
        ([NOTHING, NOTHING], [NOTHING, NOTHING]),
        ([NOTHING, NOTHING], [STARTED, NOTHING]),
        ([OVER, OVER], [LEFT, LEFT]),
    ],
)
def test_job_that_may_begin_does_so_where_nothing_is_saved(
    servers: list[str], workers: list[str]
) -> None:
    assert decided(servers, workers).kind == REFUSED
    found = decided(servers, workers, may_begin=True)
    assert (found.kind, found.job) == (BEGINNING, "")
    assert decided(servers, workers, may_begin=True, checkpoint=3).kind == VALUES


def test_job_that_may_begin_loses_nothing_that_is_saved() -> None:
    assert decided([KEPT, NOTHING], [STEPPED, STEPPED], may_begin=True).kind == REFUSED
    assert decided([KEPT, KEPT], [STEPPED, STEPPED], may_begin=True).kind == POSITIONS


# HighWaterMarks: repeated pushes are applied once; other incarnations and epochs are refused.


def test_a_push_is_new_until_it_is_applied() -> None:
    marks = HighWaterMarks()
    assert marks.is_new(0, 1, epoch=0, sequence=0)
    assert marks.is_new(0, 1, epoch=0, sequence=0)
    marks.applied(0, 1, 0)
    assert not marks.is_new(0, 1, 0, 0)
    assert marks.is_new(0, 1, 0, 1)
    assert marks.is_new(1, 1, 0, 0)


def test_restarted_worker_counts_from_zero() -> None:
    marks = HighWaterMarks()
    marks.applied(0, 1, 7)
    assert marks.is_new(0, 2, 0, 0)
    marks.applied(0, 2, 0)
    with pytest.raises(ProtocolError, match=r"started at 2 has .*started at 1 still pushes"):
        marks.is_new(0, 1, 0, 8)


def test_server_older_than_the_acknowledgement_is_refused() -> None:
    marks = HighWaterMarks()
    # no push is acknowledged yet, or servers may lose pushes
    marks.check_has(0, 1, acknowledged=0)
    marks.applied(0, 1, 7)
    for acknowledged in (0, 6, 7):
        marks.check_has(0, 1, acknowledged)
    with pytest.raises(ProtocolError, match=r"push 8 of worker 0, but push 7 is the last one"):
        marks.check_has(0, 1, 8)
    # the mark belongs to the former incarnation
    with pytest.raises(ProtocolError, match=r"push 1 of worker 0, but push 0 is the last one"):
        marks.check_has(0, 2, 1)


def test_saved_marks_restore_the_state() -> None:
    marks = HighWaterMarks()
    marks.applied(1, 5, 7)
    marks.applied(0, 5, 3)
    assert marks.marks() == [(0, 5, 3), (1, 5, 7)]
    restored = HighWaterMarks(epoch=0, marks=marks.marks())
    assert not restored.is_new(1, 5, 0, 7)
    assert restored.is_new(1, 5, 0, 8)


def test_other_epochs_are_refused() -> None:
    marks = HighWaterMarks()
    marks.begin(1)
    for epoch in (0, 2):
        with pytest.raises(ProtocolError, match=f"epoch {epoch}, but this server is in epoch 1"):
            marks.is_new(0, 1, epoch, 0)
    assert marks.is_new(0, 1, 1, 0)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        marks.begin(1)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_repeated_pushes_are_applied_once(repeats: list[int]) -> None:
    """A worker sends 0, 1, 2 ..., and repeats each before the next."""
    marks = HighWaterMarks()
    applied = []
    for sequence, times in enumerate(repeats):
        for _ in range(times + 1):
            if marks.is_new(0, 0, 0, sequence):
                applied.append(sequence)
                marks.applied(0, 0, sequence)
    assert applied == list(range(len(repeats)))
