# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of jobs with parameter servers in a bucket, to which each server writes itself."""

from pathlib import Path
from typing import Any

import pytest
from tests.fleet.served.tables.test_server_checkpoint import (
    adam,
    equal,
    load,
    saved_job,
    state,
    train,
)
from tests.served import SYNC, Job, Member
from tests.store.s3 import FaultProxy, Status

from fleetlight import checkpoint
from fleetlight.errors import CheckpointError
from fleetlight.fleet.plan.bound_plan import build_plan
from fleetlight.fleet.served.tables.loading import open_loaded
from fleetlight.ps.server.server import Server
from fleetlight.store import store_at
from fleetlight.strategy import DistributedStrategy


@pytest.mark.parametrize(("servers", "how"), [(3, {}), (1, {"background": True})])
def test_any_number_of_servers_resumes_from_a_bucket(
    bucket: str, servers: int, how: dict[str, Any]
) -> None:
    expected = saved_job(bucket, **how)
    names = [file.name for file in checkpoint.read(bucket).manifest.files]
    assert len([name for name in names if ".part" in name]) == 4
    assert not [e.name for e in store_at(bucket).list() if "token" in e.name]

    def work(member: Member) -> Any:
        train(member, range(3))
        load(member, bucket)
        assert (member.context.step, member.session.client.epoch) == (4, 1)
        train(member, range(4, 8))
        return state(member)

    found = Job(adam, SYNC, workers=2, servers=servers).run(work)
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


@pytest.mark.parametrize(("into", "out"), [("folder", "worker0"), ("worker0", "folder")])
def test_worker_0_may_carry_the_files(tmp_path: Path, into: str, out: str) -> None:
    url = tmp_path.as_uri()
    expected = saved_job(url, via=into)

    def work(member: Member) -> Any:
        load(member, url, via=out)
        train(member, range(4, 8))
        return state(member)

    for one, other in zip(Job(adam, SYNC, workers=2, servers=3).run(work), expected, strict=True):
        equal(one, other)


def test_the_tables_are_those_of_a_folder(tmp_path: Path) -> None:
    saved_job(tmp_path / "folder")
    saved_job((tmp_path / "stored").as_uri())
    folder = checkpoint.export(tmp_path / "folder", tmp_path / "one.safetensors")
    stored = checkpoint.export((tmp_path / "stored").as_uri(), tmp_path / "two.safetensors")
    assert folder.read_bytes() == stored.read_bytes()


def test_a_server_that_cannot_write_leaves_the_previous_checkpoint(
    bucket: str, s3: FaultProxy
) -> None:
    saved_job(bucket)
    before = checkpoint.read(bucket).manifest
    s3.rule = lambda method, path: (
        Status(403, "AccessDenied") if "server001" in path and method == "PUT" else None
    )
    with pytest.raises(
        CheckpointError, match=r"server 1 could not write table .* access is denied"
    ):
        saved_job(bucket)
    s3.rule = lambda method, path: None
    saved = checkpoint.read(bucket)
    assert saved.manifest == before
    saved.verify()


def test_servers_start_from_a_bucket(bucket: str) -> None:
    expected = saved_job(bucket)

    job = Job(adam, SYNC, workers=2, servers=3)
    job.servers = [Server(i, 3, 2, version="test", deadline_s=20.0) for i in range(3)]
    for server in job.servers:
        model, optimizers = job.built()
        bound = build_plan(model, optimizers, DistributedStrategy(), worker_num=2, server_num=3)
        open_loaded(server, bound, bucket)

    def work(member: Member) -> Any:
        load(member, bucket)
        train(member, range(4, 8))
        return state(member)

    for one, other in zip(job.run(work), expected, strict=True):
        equal(one, other)
