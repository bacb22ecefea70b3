# SPDX-License-Identifier: Apache-2.0
"""Carrying worker 0's checkpoint: piece by piece, and failures on either side are told to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.states import snapshot, whole_step
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.errors import CheckpointError, PeerError
from fleetlight.fleet.checkpoints import checkpoint_copy
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def carry(root: str) -> Any:
    """Worker i looks into host<i>; answers where it finds the checkpoint of which step."""
    index = fleet.worker_index()
    checkpoint_copy._CHUNK = 100  # so that every file takes several pieces
    largest = watch_pieces()
    own, copy = Path(root) / f"host{index}", Path(root) / f"copy{index}"
    found = checkpoint_copy.copy_checkpoint(current().group, own, copy)
    return found.name, whole_step(found), max(largest)


def watch_pieces() -> list[int]:
    """The sizes of all that worker 0 sends to everybody."""
    sizes, group = [0], current().group
    send = group.broadcast_bytes

    def watched(data: bytes, operation: str) -> bytes:
        received = send(data, operation)
        if not received.startswith(b"["):  # the list of names
            sizes.append(len(received))
        return received

    group.broadcast_bytes = watched  # type: ignore[method-assign]
    return sizes


def test_only_those_without_it_get_a_copy_in_pieces(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5, size=200))
    checkpoint.write(tmp_path / "host1", snapshot(3, size=200))
    (tmp_path / "host2").symlink_to("host0")
    answers = run_workers(carry, 3, str(tmp_path))
    assert [(name, step) for name, step, _ in answers] == [("host0", 5), ("copy1", 5), ("host2", 5)]
    assert {largest for _, _, largest in answers} == {100}
    assert not (tmp_path / "copy2").exists()


def test_one_folder_for_all_is_not_carried(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    (tmp_path / "host1").symlink_to("host0")
    assert [a[0] for a in run_workers(carry, 2, str(tmp_path))] == ["host0", "host1"]


def carry_badly(root: str, vanishing: bool) -> Any:
    index = fleet.worker_index()
    if vanishing:
        # worker 0 has checked its files, and then one of them is gone
        names = checkpoint_copy._names
        checkpoint_copy._names = lambda *args: [*names(*args)[:2], "generation-9/gone"]
    copy = Path(root) / f"copy{index}"
    if not vanishing:
        copy.write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be copied") as caught:
        checkpoint_copy.copy_checkpoint(current().group, Path(root) / f"host{index}", copy)
    return isinstance(caught.value, PeerError), str(caught.value)


@pytest.mark.parametrize("vanishing", [True, False], ids=["reading", "writing"])
def test_a_failure_on_one_side_is_an_error_on_all(tmp_path: Path, vanishing: bool) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    answers = run_workers(carry_badly, 2, str(tmp_path), vanishing)
    culprit = 0 if vanishing else 1
    for index, (consequence, text) in enumerate(answers):
        assert consequence is (index != culprit)
        assert text.startswith(f"on worker {culprit}: ") is (index != culprit)
        assert ("generation-9/gone" if vanishing else "copy1") in text
