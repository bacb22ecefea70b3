# SPDX-License-Identifier: Apache-2.0
"""Replay of loaders: a restarted worker resumes at the positions where its script died."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.restartable import (
    BATCH,
    RECORDS,
    Died,
    RestartableJob,
    Script,
    run_with_restart,
    sharded,
)
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fleetlight as fleet
from fleetlight.errors import ConfigError


def side_by_side(script: Script) -> None:
    """The second loader is shorter, so its epochs differ."""
    first, second = sharded(), sharded(20)
    for _ in range(first.epoch, 3):
        for (ids,), (others,) in zip(first, second, strict=False):
            script.step(ids, others)


def evaluates(script: Script) -> None:
    """Evaluates before the loop, during an epoch and after it; some loops break early."""
    loader, valid, sample = sharded(), sharded(8), sharded(20)

    def evaluate() -> None:
        batches = [ids for (ids,) in valid]
        for (ids,) in sample:
            batches.append(ids)
            break
        script.member.barrier()
        script.step(torch.cat(batches))

    def only_read() -> None:
        for _ in valid:
            pass
        for _ in sample:
            break

    only_read()
    for _ in range(loader.epoch, 3):
        for (ids,) in loader:
            script.step(ids)
            if loader.consumed % 16 == 8:
                only_read()
        only_read()
    evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("script", [side_by_side, evaluates])
@pytest.mark.parametrize("dies", [6, 1, 2, 3, 5, 7, 10, 13])
def test_replay_restores_the_positions_of_all_loaders(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], dies: int
) -> None:
    assert run_with_restart(new_job(), script, dies) == run_with_restart(new_job(), script)


def test_repeated_batch_has_the_epoch_and_the_position_of_the_first_time(
    new_job: Callable[..., RestartableJob],
) -> None:
    """As the page on reliability counts the records that a script has logged."""
    lines: list[tuple[int, int, list[int]]] = []

    def logs(script: Script) -> None:
        loader = sharded()
        for epoch in range(loader.epoch, 2):
            for (ids,) in loader:
                script.step(ids)
                lines.append((epoch, loader.consumed, ids.flatten().tolist()))
                if script.incarnation == 1 and len(lines) == 8:
                    raise Died

    run_with_restart(new_job(), logs, dies=10**6)
    assert len(lines) == 2 * RECORDS // BATCH + 1
    assert lines[7] == lines[8]
    batches = {(epoch, consumed): ids for epoch, consumed, ids in lines}
    for epoch in range(2):
        ids = [one for (of, _), own in batches.items() if of == epoch for one in own]
        assert sorted(ids) == list(range(RECORDS))


# -- another batch after the restart --------------------------------------------------------------


def skips(script: Script) -> None:
    for number, (ids,) in enumerate(sharded()):
        if script.incarnation == 1 or number:
            script.step(ids)


def never_steps(script: Script) -> None:
    loader = sharded()
    for _ in range(loader.epoch, 2):
        for (ids,) in loader:
            if script.incarnation == 1:
                script.step(ids)


def nested(script: Script) -> None:
    """The batch of the outer loader is unknown."""
    outer, inner = sharded(), sharded(8)
    for (others,) in outer:
        for (ids,) in inner:
            script.step(ids, others)


class ChangingSampler(Sampler[int]):
    """Its order changes with each pass."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        ChangingSampler.passes += 1
        return iter([(ChangingSampler.passes + n) % RECORDS for n in range(RECORDS)])

    def __len__(self) -> int:
        return RECORDS


def reorders(script: Script) -> None:
    data = TensorDataset(torch.arange(RECORDS).reshape(RECORDS, 1))
    for (ids,) in fleet.shard(DataLoader(data, BATCH, sampler=ChangingSampler())):
        script.step(ids)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (skips, r"makes a step with .* sample 12 of epoch 0 .*, not with .* sample 8 of"),
        (never_steps, "has ended its loop without it"),
        (nested, "makes a step with the batch of loader 0"),
        (reorders, r"makes a step with .* sample 8 of epoch 0 \(records \w+\), not"),
    ],
)
def test_replay_does_not_skip_a_step_on_another_batch(
    new_job: Callable[..., RestartableJob], script: Callable[[Script], None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with_restart(new_job(), script, dies=2)
