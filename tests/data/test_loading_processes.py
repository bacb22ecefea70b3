# SPDX-License-Identifier: Apache-2.0
"""The processes that load batches survive a SIGTERM which the job handles itself."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fleetlight.data.loader import ShardLoader
from fleetlight.data.loading_processes import surviving_sigterm


class Terminated(Dataset[int]):
    """Sends SIGTERM to the process that loads it, as Slurm does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return index


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_handled")
def test_batches_arrive_after_sigterm() -> None:
    loader = DataLoader(Terminated(), batch_size=1, num_workers=1)
    sharded = ShardLoader[torch.Tensor](loader, worker=0, workers=1, seed=0, tail="join")
    assert [int(batch) for batch in sharded] == [0, 1, 2, 3]


def test_nothing_changes_where_sigterm_ends_the_process() -> None:
    assert surviving_sigterm(None) is None
    assert surviving_sigterm(print) is print


@pytest.mark.usefixtures("_handled")
def test_function_of_the_user_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    begin = surviving_sigterm(print)
    assert begin is not None
    begin(7)
    assert capsys.readouterr().out == "7\n"
