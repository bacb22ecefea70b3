# SPDX-License-Identifier: Apache-2.0
"""Which jobs resume from the checkpoint in their folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetlight.errors import CheckpointError
from fleetlight.fleet.checkpoints.resumption import _found
from fleetlight.roles.role import Role
from fleetlight.strategy import DistributedStrategy


def job(role: Role, **configs: Any) -> Any:
    strategy = DistributedStrategy(checkpoint_configs=configs)
    return SimpleNamespace(role=role, strategy=strategy, is_untrained=False)


def test_job_that_may_begin_does_so_without_a_checkpoint(tmp_path: Path) -> None:
    assert _found(job(Role(resume=True, may_begin=True)), str(tmp_path)) is None


@pytest.mark.parametrize(
    ("role", "configs"),
    [(Role(resume=True), {}), (Role(resume=True, may_begin=True), {"resume": True})],
)
def test_job_that_must_resume_does_not_begin(
    role: Role, configs: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
        _found(job(role, **configs), str(tmp_path))
