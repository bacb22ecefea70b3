# SPDX-License-Identifier: Apache-2.0
"""Jobs that save bases and deltas: another job resumes from a delta as from all rows."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.fleet.served.tables.test_server_checkpoint import ALL, adam, equal, load, save, state
from tests.served import ASYNC, SYNC, Job, Member, geo, loss_of

from fleetlight import checkpoint
from fleetlight.checkpoint.storage.manifest import BaseEntry
from fleetlight.errors import CheckpointError
from fleetlight.fleet.plan.bound_plan import build_plan
from fleetlight.fleet.served.tables import server_checkpoint
from fleetlight.fleet.served.tables.loading import open_loaded
from fleetlight.ps.server.server import Server
from fleetlight.ps.tables.table import Table
from fleetlight.strategy import DistributedStrategy


def step(member: Member, ids: Sequence[int]) -> None:
    """Train on some ids; all workers have the same."""
    batch = torch.tensor(ids).repeat(6)[:6].view(2, 3)
    member.optimizer.zero_grad()
    loss_of(member.model, batch, batch.sum(1).float()).backward()
    member.optimizer.step()


def begin(member: Member) -> None:
    for _ in range(2):
        for start in range(0, 24, 6):
            step(member, ALL[start : start + 6])


def kind_of(path: Any) -> str:
    return "delta" if isinstance(checkpoint.read(path).manifest.base, BaseEntry) else "base"


def saved_job(path: Any, strategy: dict[str, Any] = SYNC, workers: int = 2, **how: Any) -> Any:
    """A base and two deltas; returns the state at the last save, and after some more steps."""

    def work(member: Member) -> Any:
        begin(member)
        save(member, path, base_every=3, **how)
        for ids in ([1, 2], [3, 29]):
            step(member, ids)
            save(member, path, base_every=3, **how)
        # one worker trains on in async mode, too, so that results are equal
        after = state(member)
        step(member, [5, 6])
        member.context.background_save.finish()
        return after, state(member)

    return Job(adam, strategy, workers=workers, servers=2).run(work)


def resumed(path: Any, strategy: dict[str, Any], servers: int, workers: int = 2, **how: Any) -> Any:
    def work(member: Member) -> Any:
        load(member, path, **how)
        after = state(member)
        step(member, [5, 6])
        return after, state(member)

    return Job(adam, strategy, workers=workers, servers=servers).run(work)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_any_number_of_servers_resumes_from_a_delta(tmp_path: Path, servers: int) -> None:
    expected = saved_job(tmp_path)
    assert kind_of(tmp_path) == "delta"
    for one, other in zip(resumed(tmp_path, SYNC, servers), expected, strict=True):
        equal(one[0], other[0], atol=0.0)
        equal(one[1], other[1])


@pytest.mark.parametrize(
    ("into", "out", "background"),
    [("folder", "folder", False), ("folder", "worker0", False), ("worker0", "folder", True)],
)
def test_deltas_in_a_bucket(bucket: str, into: str, out: str, background: bool) -> None:
    expected = saved_job(bucket, via=into, background=background)
    assert kind_of(bucket) == "delta"
    for one, other in zip(resumed(bucket, SYNC, 3, via=out), expected, strict=True):
        equal(one[0], other[0], atol=0.0)


def test_a_delta_whose_base_is_gone_is_refused(tmp_path: Path) -> None:
    saved_job(tmp_path)
    base = checkpoint.read(tmp_path).manifest.base
    assert isinstance(base, BaseEntry)
    shutil.rmtree(tmp_path / base.folder)
    with pytest.raises(CheckpointError, match=rf"server \d does not see .*{base.folder}/table"):
        resumed(tmp_path, SYNC, 2, workers=1)


@pytest.mark.parametrize("strategy", [ASYNC, geo(1)])
def test_deltas_without_lockstep(tmp_path: Path, strategy: dict[str, Any]) -> None:
    expected = saved_job(tmp_path, strategy, workers=1, via="worker0")
    assert kind_of(tmp_path) == "delta"
    [found] = resumed(tmp_path, strategy, 3, workers=1, via="worker0")
    equal(found[0], expected[0][0], atol=0.0)


def test_servers_start_from_a_delta_and_it_is_exported(tmp_path: Path) -> None:
    expected = saved_job(tmp_path / "run")
    job = Job(adam, SYNC, workers=2, servers=3)
    job.servers = [Server(i, 3, 2, version="test", deadline_s=20.0) for i in range(3)]
    for server in job.servers:
        model, optimizers = job.built()
        bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=2, server_num=3)
        open_loaded(server, bound, str(tmp_path / "run"))

    def work(member: Member) -> Any:
        load(member, tmp_path / "run")
        return state(member)

    for one, other in zip(job.run(work), expected, strict=True):
        equal(one, other[0], atol=0.0)
    out = checkpoint.export(tmp_path / "run", tmp_path / "out.safetensors")
    found = safetensors.torch.load_file(out)
    assert found["open.ids"].tolist() == [*range(24), 29]
    torch.testing.assert_close(
        found["open.weight"].numpy(), expected[0][0][0][found["open.ids"]], atol=0, rtol=0
    )
    moved = checkpoint.read(tmp_path / "run").moved_weights()["moved.weight"]
    torch.testing.assert_close(moved.numpy(), expected[0][0][1], atol=0, rtol=0)


def test_a_large_delta_becomes_a_base(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        begin(member)
        for changed, kind in ((0, "base"), (6, "delta"), (30, "base"), (3, "delta")):
            for start in range(0, changed, 6):
                step(member, ALL[start : start + min(6, changed)])
            save(member, tmp_path, base_every=10)
            assert kind_of(tmp_path) == kind

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_saves_without_deltas_mark_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a save of all rows each time, nor one into another folder, costs or changes it."""
    marked: list[int] = []
    honest = Table._keep
    monkeypatch.setattr(
        Table, "_keep", lambda table, *of: (marked.append(table._unsaved), honest(table, *of))[1]
    )

    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path / "all")
        step(member, [1])
        assert not any(marked)
        save(member, tmp_path / "some", base_every=9)
        save(member, tmp_path / "all")
        step(member, [2])
        save(member, tmp_path / "some", base_every=9)
        assert kind_of(tmp_path / "some") == "delta"

    Job(adam, SYNC, workers=1, servers=1).run(work)


def test_a_load_makes_the_next_save_a_base(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path, base_every=9)
        load(member, tmp_path)
        step(member, [1])
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "base"
        step(member, [1])
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "delta"

    Job(adam, SYNC, workers=1, servers=2).run(work)


def test_a_server_that_lost_its_cut_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write all rows, as the files of a delta."""
    honest = server_checkpoint.TableFiles.save

    def forget(files: Any, *of: Any) -> Any:
        for server in job.servers:
            server._service.checkpoints.drop()
        return honest(files, *of)

    def work(member: Member) -> None:
        begin(member)
        save(member, tmp_path, base_every=9)
        step(member, [1])
        monkeypatch.setattr(server_checkpoint.TableFiles, "save", forget)
        with pytest.raises(CheckpointError, match="was restarted after it had cut its tables"):
            save(member, tmp_path, base_every=9)
        monkeypatch.undo()
        assert kind_of(tmp_path) == "base"
        save(member, tmp_path, base_every=9)
        assert kind_of(tmp_path) == "delta"

    job = Job(adam, SYNC, workers=1, servers=2)
    job.run(work)
