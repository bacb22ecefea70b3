# SPDX-License-Identifier: Apache-2.0
"""`Publisher`: what training publishes, step by step, in jobs of one process."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Job, Member, Net, batches, geo, loss_of
from tests.store.s3 import FaultProxy, HalfObject
from torch import nn

from fleetlight.errors import (
    ConfigError,
    PlanError,
    PublicationError,
    StoreError,
    StoreRefusedError,
)
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.fleet.served.publishing import publisher as publishers
from fleetlight.fleet.served.publishing.publisher import Publisher
from fleetlight.publication.lease import LEASE, Lease
from fleetlight.publication.manifest import MANIFEST
from fleetlight.serve import Reader
from fleetlight.store import store_at

STEPS, WORKERS, IDS = 6, 2, 30


class Normed(Net):
    """A model with buffers, which no server has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(self.emb(ids).flatten(1)))
        return out


def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Normed()
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def publisher(member: Member, target: Path, **options: Any) -> Publisher | None:
    made = member.context.publish(PublishOptions(str(target), **{"every_s": 1e6, **options}))
    assert made is None or isinstance(made, Publisher)
    return made


def train(member: Member, step: int) -> None:
    ids, targets = batches(STEPS, WORKERS)
    loss_of(member.model, ids[step, member.index], targets[step, member.index]).backward()
    member.optimizer.step()
    member.optimizer.zero_grad()


def reader(target: Path, cache: Path) -> Reader:
    return Reader(target, cache=cache, follow=False, wait_s=0.0)


@pytest.mark.parametrize("strategy", [SYNC, ASYNC, geo(2), {**ASYNC, "durability": "none"}])
def test_readers_have_the_rows_and_dense_values_of_the_servers(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        found = None
        for step in range(STEPS):
            train(member, step)
            member.barrier()
            if made is not None:
                publication = made.publish_now()
                assert publication.step == step + 1
                assert bool(publication.previous) == bool(step)
                if found is None:
                    found = reader(tmp_path / "target", tmp_path / "cache")
                found.refresh()
                assert found.number == step + 1
                got = found.lookup("emb", np.arange(IDS + 5))
                assert np.array_equal(got, member.rows(np.arange(IDS + 5)))
                for name, value in member.model.state_dict().items():
                    if name != "emb.weight":
                        assert np.array_equal(found.dense[name], value.numpy()), name
                assert set(found.dense) == set(member.model.state_dict()) - {"emb.weight"}
            member.barrier()
        if made is not None:
            made.stop()
            # once more at the end
            assert made.manifest is not None
            assert made.manifest.newest.number == STEPS + 1
            assert not made.error

    Job(build, strategy, workers=WORKERS, servers=2).run(work)


def test_a_cut_waits_for_the_end_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sync mode all servers are then cut after the same step."""
    events: list[str] = []

    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        ask, step, waits = made._ask, member.communicator.step, threading.Event()

        class Gate:
            lock = threading.Lock()

            def acquire(self, timeout: float = -1) -> bool:
                if threading.current_thread() is thread:
                    # the step ends only once the publisher asks for the gate
                    waits.set()
                return self.lock.acquire(timeout=timeout)

            def release(self) -> None:
                self.lock.release()

        def asked(message: Any, nbytes: int = 0) -> Any:
            events.append(type(message).__name__)
            return ask(message, nbytes)

        def stepped(update: Any) -> bool:
            events.append("begins")
            thread.start()
            waits.wait(60)
            assert gate.lock.locked(), "the step does not hold the gate"
            done = step(update)
            events.append("ends")
            return done

        thread, gate = threading.Thread(target=made.publish_now), Gate()
        made._gate = member.session.trainer_guard.gate = gate  # type: ignore[assignment]
        monkeypatch.setattr(made, "_ask", asked)
        monkeypatch.setattr(member.communicator, "step", stepped)
        train(member, 0)
        thread.join()
        made.stop(publish=False)

    Job(build, SYNC, workers=1, servers=2).run(work)
    assert events[:4] == ["begins", "PublicationRequest", "ends", "PublicationCut"]


def alone(tmp_path: Path, work: Any) -> None:
    """Run in a job of one worker."""
    Job(build, ASYNC, workers=1, servers=1).run(work)


def test_a_thread_publishes_by_itself(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target", every_s=0.01)
        assert made is not None
        with Reader(tmp_path / "target", cache=tmp_path / "cache", period_s=0.01) as found:
            train(member, 0)
            member.communicator.flush()
            want = member.rows(np.arange(IDS))
            while not np.array_equal(found.lookup("emb", np.arange(IDS)), want):
                time.sleep(0.001)
        made.stop()

    alone(tmp_path, work)


def test_a_base_replaces_many_deltas_and_their_files_are_deleted(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target", compact_at=0.0, grace_s=0.0)
        assert made is not None
        made.publish_now()
        # files of some bytes are not worth a base
        made._is_long = lambda: made._target.number % 3 == 0  # type: ignore[method-assign]
        for step in range(5):
            train(member, step)
            made.publish_now()
        assert made.manifest is not None
        assert (made.manifest.base.number, len(made.manifest.deltas)) == (4, 2)
        there = {path.name.partition("-")[0] for path in (tmp_path / "target").iterdir()}
        assert there >= {"00000004", "00000005", "00000006"}
        assert not there & {"00000001", "00000002", "00000003"}
        made.stop(publish=False)

    alone(tmp_path, work)


def test_deltas_become_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        monkeypatch.setattr(publishers, "_MAX_DELTAS", 2)
        kinds = [bool(made.publish_now().previous) for _ in range(5)]
        assert kinds == [False, True, True, False, True]
        made.stop(publish=False)

    alone(tmp_path, work)


def test_a_publication_that_fails_is_absent_and_the_next_has_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        made.publish_now()
        before = (tmp_path / "target" / MANIFEST).read_bytes()
        with monkeypatch.context() as patch:

            def fails(prefix: str, data: bytes) -> Any:
                raise OSError("no space left on the device")

            patch.setattr(made._target, "put_dense", fails)
            train(member, 0)
            with pytest.raises(OSError, match="no space left"):
                made.publish_now()
            assert isinstance(made.error, OSError)
        assert (tmp_path / "target" / MANIFEST).read_bytes() == before
        assert made.publish_now().files[0].rows > 0
        assert made.error is None
        found = reader(tmp_path / "target", tmp_path / "cache")
        assert np.array_equal(found.lookup("emb", np.arange(IDS)), member.rows(np.arange(IDS)))
        made.stop(publish=False)

    alone(tmp_path, work)


def test_a_folder_that_worker_0_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        # the server writes to the disk of its own host
        options = PublishOptions(str(tmp_path / "elsewhere"))
        monkeypatch.setattr(made, "_options", options)
        with pytest.raises(PublicationError, match="worker 0 sees no such file; publish to a buck"):
            made.publish_now()
        made.stop(publish=False)

    alone(tmp_path, work)


def test_a_new_publisher_continues_the_numbers_in_a_new_epoch(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for epoch in (1, 2):
            made = publisher(member, tmp_path / "target")
            assert made is not None
            first, second = made.publish_now(), made.publish_now()
            assert (first.number, first.previous) == (2 * epoch - 1, "")
            assert second.previous == first.id
            assert made.manifest is not None
            assert made.manifest.epoch == epoch
            with pytest.raises(PlanError, match=r"fleet\.publish was called twice"):
                publisher(member, tmp_path / "another")
            made.stop(publish=False)
            with pytest.raises(PublicationError, match=r"this publisher to .* has stopped"):
                made.publish_now()

    alone(tmp_path, work)


def test_a_publisher_whose_lease_was_taken_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishers, "RENEW_S", 0.01)

    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        (tmp_path / "target" / LEASE).write_bytes(
            b'{"job":"","process":"process 7 on host","token":"t","renewed":0,"renew_s":5.0}'
        )
        made._over.wait(60)
        train(member, 0)
        made.stop()

    alone(tmp_path, work)
    assert "this job publishes no longer" in caplog.text
    assert "process 7 on host publishes here now" in caplog.text


def test_a_manifest_whose_reply_was_lost_does_not_end_publications(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        made.publish_now()
        swap = made._target.store.swap

        def loses_reply(name: str, data: Any, version: str) -> str | None:
            swap(name, data, version)
            raise StoreError("the reply was lost")

        train(member, 0)
        with monkeypatch.context() as patch:
            patch.setattr(made._target.store, "swap", loses_reply)
            with pytest.raises(StoreError):
                made.publish_now()
        found = reader(tmp_path / "target", tmp_path / "cache")
        assert found.number == 2
        train(member, 1)
        with pytest.raises(PublicationError, match="is not the one that this job wrote last"):
            made.publish_now()
        # the reader may have read what arrived, so all rows follow in a new epoch
        assert made.publish_now().previous == ""
        assert made.publish_now().previous
        assert found.refresh()
        assert (found.number, found.epoch) == (4, 2)
        assert np.array_equal(found.lookup("emb", np.arange(IDS)), member.rows(np.arange(IDS)))
        made.stop(publish=False)

    alone(tmp_path, work)


def test_a_late_publication_of_another_publisher_does_not_end_publications(tmp_path: Path) -> None:
    """It was suspended for longer than its lease lasts."""

    def work(member: Member) -> None:
        first = publisher(member, tmp_path / "target")
        assert first is not None
        # as if another process had taken the lease over
        first._lease.release()
        member.context.publisher = None
        second = publisher(member, tmp_path / "target")
        assert second is not None
        first.publish_now()
        with pytest.raises(PublicationError, match="is not the one that this job wrote last"):
            second.publish_now()
        assert second.publish_now().number == 2
        with pytest.raises(PublicationError):
            first.publish_now()
        with pytest.raises(PublicationError, match="publishes here now, in place of this job"):
            first.publish_now()
        first.abandon()
        second.stop(publish=False)

    alone(tmp_path, work)


def test_the_lease_is_renewed_until_the_last_publication_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "RENEW_S", 0.01)

    def work(member: Member) -> None:
        made = publisher(member, tmp_path / "target")
        assert made is not None
        renewed, renew = threading.Event(), made._lease.renew

        def renews() -> None:
            renew()
            renewed.set()

        def publishes() -> Any:
            renewed.clear()
            assert renewed.wait(60)

        monkeypatch.setattr(made._lease, "renew", renews)
        monkeypatch.setattr(made, "publish_now", publishes)
        made.stop()
        assert b'"is_over":true' in (tmp_path / "target" / LEASE).read_bytes()

    alone(tmp_path, work)


def test_a_publisher_that_cannot_start_leaves_no_lease(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / MANIFEST).write_text("{")
        with pytest.raises(PublicationError, match="is damaged"):
            publisher(member, tmp_path / "target")
        assert b'"is_over":true' in (tmp_path / "target" / LEASE).read_bytes()

    alone(tmp_path, work)


def test_tables_and_forms_are_chosen_by_name(tmp_path: Path) -> None:
    options = PublishOptions(str(tmp_path), rows={"b": "int8"}, tables=["a", "b"])
    assert options.forms(["c", "b", "a"]) == {1: "int8", 2: "f32"}
    assert PublishOptions("x", rows="f16").forms(["a", "b"]) == {0: "f16", 1: "f16"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tables": ["emc"]}, "there is no table 'emc'; did you mean 'emb'"),
        ({"rows": {"other": "f16"}}, "there is no table 'other'; known names: emb"),
    ],
)
def test_unknown_tables_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    def work(member: Member) -> None:
        with pytest.raises(ConfigError, match=text):
            publisher(member, tmp_path / "target", **options)

    alone(tmp_path, work)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_s": 0}, "got every_s=0, expected a number above 0"),
        ({"every_s": "1"}, "got every_s='1'"),
        ({"grace_s": float("nan")}, "got grace_s=nan"),
        ({"rows": "f8"}, "got rows='f8'; known names: f16, f32, int8"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PublishOptions("target", **options)


def test_a_job_that_is_not_open_yet(tmp_path: Path) -> None:
    job = Job(build, ASYNC, workers=2, servers=1)
    with pytest.raises(PlanError, match=r"call fleet\.init_worker"):
        job.member(0).context.publish(PublishOptions(str(tmp_path)))


# Publications in a bucket.


@pytest.mark.slow
def test_readers_follow_a_bucket(bucket: str, tmp_path: Path) -> None:
    def work(member: Member) -> None:
        made = member.context.publish(PublishOptions(bucket, every_s=1e6))
        assert made is not None
        made.publish_now()
        with Reader(bucket, cache=tmp_path, follow=False) as reader:
            for step in range(STEPS):
                train(member, step)
                member.communicator.flush()
                made.publish_now()
                assert reader.refresh()
                want = member.rows(np.arange(IDS))
                assert np.array_equal(reader.lookup("emb", np.arange(IDS)), want)
        # a second publisher watches the lease; the first one renews it
        store = store_at(bucket)
        assert store.head(LEASE) is not None

        def renewed(seconds: float) -> None:
            made._lease.renew()  # type: ignore[attr-defined]

        with pytest.raises(PublicationError, match="publishes here already"):
            Lease.acquire(store, "", pause=renewed)
        made.stop(publish=False)

    Job(build, ASYNC, workers=1, servers=2).run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emb.server1", "dense"])
def test_a_file_that_arrives_half_is_not_published(bucket: str, s3: FaultProxy, name: str) -> None:
    def work(member: Member) -> None:
        made = member.context.publish(PublishOptions(bucket, every_s=1e6))
        assert made is not None
        s3.fail(HalfObject(), method="PUT", path=f"/{name}")
        with pytest.raises(
            PublicationError, match=rf"/{name}\..*wrote \d+ bytes, and worker 0 sees"
        ):
            made.publish_now()
        assert store_at(bucket).head(MANIFEST) is None
        made.publish_now()
        assert store_at(bucket).head(MANIFEST) is not None
        made.stop(publish=False)

    Job(build, ASYNC, workers=1, servers=2).run(work)


@pytest.mark.slow
def test_a_bucket_that_does_not_exist(bucket: str, tmp_path: Path) -> None:
    missing = bucket.replace("/run", "-missing/run")

    def work(member: Member) -> None:
        with pytest.raises(StoreRefusedError, match="-missing"):
            member.context.publish(PublishOptions(missing))

    Job(build, ASYNC, workers=1, servers=1).run(work)
    with pytest.raises(StoreRefusedError, match=r"-missing.*the bucket does not exist"):
        Reader(missing, cache=tmp_path, wait_s=300.0)
