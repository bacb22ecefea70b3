# SPDX-License-Identifier: Apache-2.0
"""`fleetlight checkpoints` on folders and URLs."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.states import snapshot, whole_step
from tests.store.s3 import FaultProxy

from fleetlight import checkpoint
from fleetlight.checkpoint.storage import maintenance
from fleetlight.checkpoint.storage.manifest import FORMAT
from fleetlight.checkpoint.storage.stored_generations import new_stored_generation
from fleetlight.cli.fleetlight import main
from fleetlight.cli.terminal import output
from fleetlight.store import store_at


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Steps 1 to 3, of which the last two are kept."""
    for step in (1, 2, 3):
        checkpoint.write((tmp_path / "run").as_uri(), snapshot(step), keep=2)
    return (tmp_path / "run").as_uri()


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert main(["checkpoints", *argv]) == code
    out, error = capsys.readouterr()
    return (out or error).splitlines()


def test_list_prints_a_line_for_each_generation(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = said(capsys, "list", url)
    assert head.split()[0] == "generation"
    assert [(line.split()[0], line.split()[3]) for line in lines] == [("3", "3"), ("2", "2")]
    assert "1 worker" in lines[0]
    checkpoint.write(tmp_path / "folder", snapshot(7))
    assert said(capsys, "list", str(tmp_path / "folder"))[1].split()[3] == "7"
    assert "no such directory" in said(capsys, "list", str(tmp_path / "no"), code=1)[0]


def test_the_list_follows_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(tmp_path, snapshot(7))
    [plain] = maintenance.generations(tmp_path)
    large = msgspec.structs.replace(plain, workers=1000, servers=16)
    monkeypatch.setattr(maintenance, "generations", lambda location: [large])
    [_, line] = said(capsys, "list", str(tmp_path))
    assert line.endswith("  3      1000 workers, 16 servers, 0 rows"), "a pipe gets whole lines"
    monkeypatch.setattr(output, "columns", lambda stream=None: 40)
    lines = said(capsys, "list", str(tmp_path))
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "1"
    assert "  step: 7" in lines
    assert lines[-1] == "  job: 1000 workers, 16 servers, 0 rows"


def test_verify_finds_a_changed_byte(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", "--all", url) == [
        "generation 3: 3 files as they were written",
        "generation 2: 3 files as they were written",
    ]
    saved = checkpoint.read(url).manifest
    assert isinstance(saved.earlier, list)
    name = f"{saved.earlier[0].folder}/model.safetensors"
    data = bytearray(store_at(url).get(name).data)
    data[-1] ^= 1
    store_at(url).put(name, data)
    assert len(said(capsys, "verify", url)) == 1, "the current one is as it was"
    lines = said(capsys, "verify", "--all", url, code=1)
    assert "model.safetensors was changed after it was written" in lines[1]


def test_prune_keeps_the_last_generations(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    killed = new_stored_generation(url, FORMAT, 1).__enter__()
    assert said(capsys, "prune", "--keep", "2", url) == ["removed 0 folders"], "it may still save"
    with killed.create("a") as sink:
        sink.write(b"")
    assert said(capsys, "prune", url) == ["removed 1 folder"]
    assert len(said(capsys, "list", url)) == 2
    assert said(capsys, "verify", "--all", url) == ["generation 3: 3 files as they were written"]
    assert whole_step(url) == 3
    assert "expected at least 1" in said(capsys, "prune", "--keep", "0", url, code=1)[0]


def test_prune_of_a_folder_removes_remains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    (tmp_path / "generation-000009").mkdir()
    assert said(capsys, "prune", str(tmp_path)) == ["removed 1 folder"]
    assert whole_step(tmp_path) == 1
    assert said(capsys, "prune", str(tmp_path / "none"), code=1)
    assert not (tmp_path / "none").exists()


def test_copies_are_the_checkpoint(
    url: str, bucket: str, s3: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "folder")
    assert said(capsys, "copy", url, bucket)[-1] == f"copied step 3 to {bucket}, as generation 1"
    assert whole_step(bucket) == 3
    said(capsys, "copy", "--generation", "2", url, bucket)
    assert whole_step(bucket) == 2
    said(capsys, "copy", bucket, folder)
    assert whole_step(folder) == 2
    # the folder is as any other: the next save replaces the copy
    checkpoint.write(folder, snapshot(5))
    assert whole_step(folder) == 5
    assert len(list(Path(folder).glob("generation-*"))) == 1
    assert (
        "has no generation 9; it has 3, 2"
        in said(capsys, "copy", "--generation", "9", url, folder, code=1)[0]
    )


def test_a_damaged_checkpoint_is_not_copied(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{checkpoint.read(url).manifest.folder}/optimizer.safetensors"
    store_at(url).put(name, b"something else")
    lines = said(capsys, "copy", url, str(tmp_path / "copy"), code=1)
    assert any("was changed after it was written" in line for line in lines) or lines
    assert not (tmp_path / "copy" / "manifest.json").exists()


@pytest.mark.slow
def test_the_commands_need_no_torch(url: str) -> None:
    program = (
        "import sys; from fleetlight.cli.fleetlight import main; "
        f"assert main(['checkpoints', 'verify', {url!r}]) == 0; "
        "assert not {'torch', 'numba', 'obstore'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
