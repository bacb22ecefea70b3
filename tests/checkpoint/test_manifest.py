# SPDX-License-Identifier: Apache-2.0
"""The manifest: exact bytes, versions, and damage."""

import hashlib
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.checkpoint.states import described, full_disk_at

from fleetlight.checkpoint.storage import files
from fleetlight.checkpoint.storage.manifest import (
    VERSION,
    FileEntry,
    HighWaterEntry,
    Manifest,
    decode,
    encode,
)
from fleetlight.errors import CheckpointError, CorruptCheckpointError

PATH = Path("ckpt/manifest.json")


def manifest(version: int = VERSION) -> Manifest:
    return Manifest(
        format="f",
        version=version,
        checksum="",
        generation=3,
        created=datetime(2030, 1, 2, tzinfo=timezone.utc),
        fleetlight="0.1",
        torch="2",
        files=[FileEntry("model.safetensors", 12, "ab")],
        workers=2,
        servers=0,
        seed=2**64 - 1,
        epoch=1,
        step=7,
        tensors=[],
        aliases={"b": "a"},
        model_extra={},
        optimizers=[],
        high_water=[HighWaterEntry(0, 1, 2, 3)],
    )


def test_a_manifest_survives_the_round_trip() -> None:
    data = encode(manifest())
    found = decode(data, Manifest, "f", PATH)
    assert msgspec.structs.replace(found, checksum="") == manifest()
    assert encode(found) == data


def test_another_version_is_refused_before_its_fields() -> None:
    data = b'{"format":"f","version":99,"checksum":"","generation":1,"nothing":"we know"}'
    with pytest.raises(CheckpointError, match="format version 99, expected 1; use"):
        decode(data, Manifest, "f", PATH)


def test_another_format_is_named() -> None:
    with pytest.raises(CheckpointError, match="got format 'f', expected 'g'"):
        decode(encode(manifest()), Manifest, "g", PATH)


@pytest.mark.parametrize("cut", [0, 1, 40, -3])
def test_a_truncated_manifest_is_damaged(cut: int) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"ckpt/manifest.json is damaged"):
        decode(encode(manifest())[:cut], Manifest, "f", PATH)


def test_garbage_names_the_position() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"\(byte 1\)"):
        decode(b"{garbage", Manifest, "f", PATH)


def test_a_wrong_type_names_the_field() -> None:
    data = encode(manifest()).replace(b'"generation": 3', b'"generation": "x"')
    with pytest.raises(CorruptCheckpointError, match=r"\$\.generation"):
        decode(data, Manifest, "f", PATH)


@pytest.mark.parametrize("edit", [(b'"step": 7', b'"step": 8'), (b'"b": "a"', b'"b": "c"')])
def test_an_edited_field_is_noticed(edit: tuple[bytes, bytes]) -> None:
    data = encode(manifest())
    assert edit[0] in data
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json was changed .* got sha256"):
        decode(data.replace(*edit), Manifest, "f", PATH)


def test_a_removed_checksum_is_noticed() -> None:
    data = encode(manifest())
    checksum = decode(data, Manifest, "f", PATH).checksum.encode()
    with pytest.raises(CorruptCheckpointError, match="was changed"):
        decode(data.replace(checksum, b""), Manifest, "f", PATH)


# -- files are complete or absent -----------------------------------------------------------------


def test_a_sink_returns_size_and_checksum(tmp_path: Path) -> None:
    data = os.urandom(3000)
    with files.Sink(tmp_path / "a") as sink:
        sink.write(data[:1000])
        sink.write(memoryview(data)[1000:])
        sink.write(b"")
        entry = sink.flush()
    assert (tmp_path / "a").read_bytes() == data
    assert entry == FileEntry("a", 3000, hashlib.sha256(data).hexdigest())
    assert described(tmp_path / "a") == entry
    files.verify(tmp_path / "a", entry)


def test_a_sink_never_writes_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        files.Sink(tmp_path / "a")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    with files.Sink(tmp_path / "a") as sink:
        sink.write(bytes(range(100)))
        entry = sink.flush()
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    assert entry.sha256 == hashlib.sha256(bytes(range(100))).hexdigest()


def test_verify_distinguishes_truncated_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    entry = described(path)
    path.write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match=r"a was truncated .* 4 bytes, expected 8"):
        files.verify(path, entry)
    path.write_bytes(b"1234567x")
    with pytest.raises(CorruptCheckpointError, match=f"a was changed .* expected {entry.sha256}"):
        files.verify(path, entry)


def test_replacing_shows_the_old_file_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with files.replacing(path) as sink:
        sink.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", range(1, 5))
def test_a_failed_replacement_keeps_the_old_file(
    tmp_path: Path, watched_os: Any, call: int
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    watched_os(full_disk_at(call))
    with pytest.raises(OSError, match="No space"), files.replacing(path) as sink:
        sink.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
