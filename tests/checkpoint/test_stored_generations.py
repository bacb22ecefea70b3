# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under a URL: a save is whole or absent, whatever the network and other jobs do."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from tests.checkpoint.states import snapshot, whole_step
from tests.store.s3 import CutRequest, FaultProxy, HalfObject, LostReply, Status

from fleetlight import checkpoint
from fleetlight.checkpoint.storage.files import FileTarget
from fleetlight.checkpoint.storage.manifest import FORMAT
from fleetlight.checkpoint.storage.stored_generations import new_stored_generation
from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.store import store_at


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    return (tmp_path / "run").as_uri()


def folders(url: str) -> set[str]:
    return {e.name.partition("/")[0] for e in store_at(url).list("generation-")}


def test_a_save_is_read_as_it_was(url: str) -> None:
    assert not checkpoint.exists(url)
    written = checkpoint.write(url, snapshot(3))
    assert checkpoint.exists(url)
    assert whole_step(url) == 3
    assert checkpoint.read(url).manifest == dataclasses_checked(url, written)


def dataclasses_checked(url: str, written: checkpoint.Manifest) -> checkpoint.Manifest:
    """As written, with the checksum that only the bytes have."""
    import msgspec

    return msgspec.structs.replace(
        written, checksum=checkpoint.read(url).manifest.checksum, created=written.created
    )


def test_the_last_generations_stay(url: str) -> None:
    for step in range(1, 5):
        checkpoint.write(url, snapshot(step), keep=3)
    saved = checkpoint.read(url).manifest
    assert saved.generation == 4
    assert isinstance(saved.earlier, list)
    assert [one.generation for one in saved.earlier] == [3, 2]
    assert folders(url) == {saved.folder, *(one.folder for one in saved.earlier)}
    checkpoint.write(url, snapshot(5), keep=1)
    assert folders(url) == {checkpoint.read(url).manifest.folder}
    assert whole_step(url) == 5


def test_the_second_of_two_writers_is_refused(url: str) -> None:
    checkpoint.write(url, snapshot(1))

    def save_meanwhile(target: FileTarget) -> checkpoint.SavedTables:
        checkpoint.write(url, snapshot(2))
        return checkpoint.SavedTables()

    late = dataclasses.replace(snapshot(9), save_tables=save_meanwhile)
    with pytest.raises(CheckpointError, match="another process has saved there since this save"):
        checkpoint.write(url, late)
    assert whole_step(url) == 2
    assert folders(url) == {checkpoint.read(url).manifest.folder}, "that of the other is gone"


def test_the_second_of_two_first_writers_is_refused(url: str) -> None:
    def save_meanwhile(target: FileTarget) -> checkpoint.SavedTables:
        checkpoint.write(url, snapshot(2))
        return checkpoint.SavedTables()

    late = dataclasses.replace(snapshot(9), save_tables=save_meanwhile)
    with pytest.raises(CheckpointError, match="another process has saved there"):
        checkpoint.write(url, late)
    assert whole_step(url) == 2


def test_a_writer_is_refused_at_the_last_moment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one publishes between the last look and the swap."""
    checkpoint.write(url, snapshot(1))
    from fleetlight.checkpoint.storage.stored_generations import StoredGeneration

    honest = StoredGeneration._compare_sizes

    def compare(generation: StoredGeneration) -> None:
        honest(generation)
        monkeypatch.setattr(StoredGeneration, "_compare_sizes", honest)
        checkpoint.write(url, snapshot(2))

    monkeypatch.setattr(StoredGeneration, "_compare_sizes", compare)
    with pytest.raises(CheckpointError, match="another process has saved there"):
        checkpoint.write(url, snapshot(9))
    assert whole_step(url) == 2


def test_a_save_that_was_killed_leaves_the_previous_checkpoint(url: str) -> None:
    checkpoint.write(url, snapshot(1))
    killed = new_stored_generation(url, FORMAT, 1).__enter__()
    with killed.create("model.safetensors") as sink:
        sink.write(b"half")
    assert whole_step(url) == 1
    assert len(folders(url)) == 2
    checkpoint.write(url, snapshot(2), keep=1)
    assert whole_step(url) == 2
    assert len(folders(url)) == 1, "the next save removes its remains"


def test_a_failed_save_leaves_the_previous_checkpoint(url: str) -> None:
    checkpoint.write(url, snapshot(1))

    def fail(target: FileTarget) -> checkpoint.SavedTables:
        raise CheckpointError("server 1 is gone")

    with pytest.raises(CheckpointError, match="server 1 is gone"):
        checkpoint.write(url, dataclasses.replace(snapshot(2), save_tables=fail))
    assert whole_step(url) == 1
    assert len(folders(url)) == 1


def test_other_content_is_not_overwritten(url: str) -> None:
    store_at(url).put("manifest.json", b'{"format": "another", "generation": 3}')
    with pytest.raises(CheckpointError, match="is not the manifest of a fleetlight-checkpoint"):
        checkpoint.write(url, snapshot(1))
    store_at(url).put("manifest.json", b"not JSON")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged \(8 bytes\)"):
        checkpoint.write(url, snapshot(1))
    assert bytes(store_at(url).get("manifest.json").data) == b"not JSON"


def test_a_changed_object_is_found(url: str) -> None:
    checkpoint.write(url, snapshot(1))
    name = f"{checkpoint.read(url).manifest.folder}/model.safetensors"
    data = bytearray(store_at(url).get(name).data)
    data[-1] ^= 1
    store_at(url).put(name, data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors was changed after"):
        checkpoint.read(url).model()
    store_at(url).delete([name])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is missing, but"):
        checkpoint.read(url).model()


def test_a_save_replaces_what_is_being_read(url: str) -> None:
    checkpoint.write(url, snapshot(1), keep=1)
    saved = checkpoint.read(url)
    checkpoint.write(url, snapshot(2), keep=1)
    with pytest.raises(CheckpointError, match="generation 1 was replaced by 2 while it was"):
        saved.model()


def test_an_object_that_arrived_half_is_no_checkpoint(bucket: str, s3: FaultProxy) -> None:
    checkpoint.write(bucket, snapshot(1))
    s3.fail(HalfObject(), method="PUT", path="model")
    told = r"model\.safetensors has \d+ bytes after its upload, expected \d+ bytes; save again"
    with pytest.raises(CorruptCheckpointError, match=told):
        checkpoint.write(bucket, snapshot(2))
    assert whole_step(bucket) == 1


def test_a_manifest_that_arrived_half_is_sent_again(bucket: str, s3: FaultProxy) -> None:
    for step in (1, 2):
        s3.fail(HalfObject(), method="PUT", path=r"run/manifest\.json")
        checkpoint.write(bucket, snapshot(step))
        assert whole_step(bucket) == step


def test_a_half_manifest_of_a_save_that_lost_its_rights(
    bucket: str, s3: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.write(bucket, snapshot(1))
    sent = []

    def half_and_then_denied(method: str, path: str) -> object:
        if not path.endswith("run/manifest.json"):
            return None
        if method == "PUT":
            sent.append(path)
            return HalfObject()
        return Status(403, "AccessDenied") if sent else None

    s3.rule = half_and_then_denied  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="access is denied"):
        checkpoint.write(bucket, snapshot(2))
    s3.rule = lambda method, path: None
    # the files of the second one had all arrived
    assert whole_step(bucket) == 2
    assert re.search(
        r"manifest.json is damaged; generation-000002-\w+/manifest.json is read", caplog.text
    )
    checkpoint.write(bucket, snapshot(3))
    caplog.clear()
    assert whole_step(bucket) == 3
    assert not caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", [LostReply(), Status(500), Status(503, "SlowDown"), CutRequest()])
def test_faults_that_pass_do_not_fail_a_save(bucket: str, s3: FaultProxy, fault: object) -> None:
    requests: list[str] = []

    def every_third(method: str, path: str) -> object:
        requests.append(method)
        return fault if len(requests) % 3 == 0 else None

    s3.rule = every_third  # type: ignore[assignment]
    for step in (1, 2):
        checkpoint.write(bucket, snapshot(step))
        assert whole_step(bucket) == step
    assert len(requests) > 20


def test_a_bucket_that_does_not_exist_is_told_at_once(s3: FaultProxy) -> None:
    for call in (checkpoint.exists, checkpoint.read, lambda u: checkpoint.write(u, snapshot(1))):
        with pytest.raises(CheckpointError, match="the bucket does not exist; create it"):
            call("s3://nowhere/run")  # type: ignore[operator]


@pytest.mark.slow
def test_inference_models_go_into_buckets(bucket: str) -> None:
    model = torch.nn.Linear(4, 2)
    for _ in range(3):
        torch.nn.init.normal_(model.weight)
        checkpoint.save_inference(bucket, model, torch.ones(2, 4))
        loaded = checkpoint.load_inference(bucket)
        assert torch.equal(loaded(torch.ones(3, 4)), model(torch.ones(3, 4)))
