# SPDX-License-Identifier: Apache-2.0
"""Copies of worker 0's checkpoint: sent in chunks; a failure on any side reaches all workers."""

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.states import snapshot, whole_step
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.errors import CheckpointError, PeerError
from fleetlight.fleet.checkpoints import loading
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def copy_to_all(root: str) -> Any:
    """Worker i reads host<i>; returns the folder and the step of the checkpoint it uses."""
    index = fleet.worker_index()
    loading._CHUNK = 100  # so that every file takes several chunks
    largest = watch_chunks()
    own, copy = Path(root) / f"host{index}", Path(root) / f"copy{index}"
    found = loading.copy_checkpoint(current().group, str(own), copy)
    return Path(found).name, whole_step(found), max(largest)


def watch_chunks() -> list[int]:
    """The sizes of all messages that worker 0 broadcasts."""
    sizes, group = [0], current().group
    send = group.broadcast_bytes

    def watched(data: bytes, operation: str) -> bytes:
        received = send(data, operation)
        if not received.startswith(b"["):  # the list of names
            sizes.append(len(received))
        return received

    group.broadcast_bytes = watched  # type: ignore[method-assign]
    return sizes


def test_only_workers_without_the_checkpoint_get_a_chunked_copy(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5, size=200))
    checkpoint.write(tmp_path / "host1", snapshot(3, size=200))
    (tmp_path / "host2").symlink_to("host0")
    answers = run_workers(copy_to_all, 3, str(tmp_path))
    assert [(name, step) for name, step, _ in answers] == [("host0", 5), ("copy1", 5), ("host2", 5)]
    assert {largest for _, _, largest in answers} == {100}
    assert not (tmp_path / "copy2").exists()


def test_shared_folder_is_not_copied(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    (tmp_path / "host1").symlink_to("host0")
    assert [a[0] for a in run_workers(copy_to_all, 2, str(tmp_path))] == ["host0", "host1"]


def copy_and_fail(root: str, vanishing: bool) -> Any:
    index = fleet.worker_index()
    if vanishing:
        # worker 0 has checked its files, then one of them vanishes
        found, gone = loading._found, Path(root, "generation-9/gone")
        loading._found = lambda *args: {**found(*args), "generation-9/gone": gone}
    copy = Path(root) / f"copy{index}"
    if not vanishing:
        copy.write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be copied") as caught:
        loading.copy_checkpoint(current().group, f"{root}/host{index}", copy)
    return isinstance(caught.value, PeerError), str(caught.value)


@pytest.mark.parametrize("vanishing", [False, True], ids=["writing", "reading"])
def test_failure_on_one_worker_is_an_error_on_all(tmp_path: Path, vanishing: bool) -> None:
    checkpoint.write(tmp_path / "host0", snapshot(5))
    answers = run_workers(copy_and_fail, 2, str(tmp_path), vanishing)
    culprit = 0 if vanishing else 1
    for index, (consequence, text) in enumerate(answers):
        assert consequence is (index != culprit)
        assert text.startswith(f"on worker {culprit}: ") is (index != culprit)
        assert ("generation-9/gone" if vanishing else "copy1") in text
