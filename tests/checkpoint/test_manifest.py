# SPDX-License-Identifier: Apache-2.0
"""The manifest: exact bytes, versions, and damage."""

from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest

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
