# SPDX-License-Identifier: Apache-2.0
"""The facts of the job."""

from collections.abc import Iterator

import pytest

from fleetlight.strategy import DistributedStrategy, JobFacts, current_job, set_current_job


@pytest.fixture(autouse=True)
def restore_job() -> Iterator[None]:
    before = current_job()
    yield
    set_current_job(before)


def test_a_strategy_is_explained_for_the_current_job() -> None:
    strategy = DistributedStrategy(sync_batch_norm=True)
    set_current_job(JobFacts(worker_num=1))
    assert len(strategy.inert()) == 1
    set_current_job(JobFacts(worker_num=3))
    assert strategy.inert() == []
    assert strategy.explain().startswith("job: collective, 3 workers")
