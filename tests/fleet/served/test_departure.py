# SPDX-License-Identifier: Apache-2.0
"""WorkerDeparture: a worker leaves after SIGTERM, but never between a batch and its step."""

import os
import signal
import types
from collections.abc import Iterator
from typing import Any

import pytest

from fleetlight.fleet.served.stop_agreement import WorkerDeparture, WorkerLeaves
from fleetlight.roles import Role


class Merge:
    def __init__(self) -> None:
        self.open = False

    def is_between(self) -> bool:
        return self.open


@pytest.fixture
def merge() -> Merge:
    return Merge()


@pytest.fixture
def departure(merge: Merge) -> Iterator[WorkerDeparture]:
    optimizers = [types.SimpleNamespace(merge=None), types.SimpleNamespace(merge=merge)]
    job: Any = types.SimpleNamespace(role=Role(), optimizers=optimizers, step=5)
    made = WorkerDeparture(job)
    yield made
    made.close()


def test_it_stays_without_a_signal(departure: WorkerDeparture) -> None:
    departure.leave_if_asked()


def test_it_leaves_after_the_step_of_its_batch(departure: WorkerDeparture) -> None:
    departure.batch_begins()
    os.kill(os.getpid(), signal.SIGTERM)
    departure.leave_if_asked()
    departure.step_made()
    with pytest.raises(WorkerLeaves) as left:
        departure.leave_if_asked()
    assert left.value.code == 0


def test_it_leaves_after_the_last_step_of_a_merge(departure: WorkerDeparture, merge: Merge) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    departure.batch_begins()
    merge.open = True
    departure.step_made()
    departure.leave_if_asked()
    merge.open = False
    departure.step_made()
    with pytest.raises(WorkerLeaves):
        departure.leave_if_asked()
