# SPDX-License-Identifier: Apache-2.0
"""Deltas in folders and under URLs: what a manifest that is kept needs stays, and is whole."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.checkpoint.states import snapshot, whole_step

from fleetlight import checkpoint
from fleetlight.checkpoint import Bases, SavedTables, TableEntry, TableFileEntry
from fleetlight.checkpoint.storage import maintenance
from fleetlight.checkpoint.storage.files import FileTarget
from fleetlight.checkpoint.storage.manifest import FORMAT
from fleetlight.checkpoint.storage.stored_generations import new_stored_generation
from fleetlight.cli.fleetlight import main
from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.store import is_url, store_at

ROOT = Path(__file__).parents[2]
EVERY = 3


def parts_of(step: int) -> dict[str, list[int]]:
    """A delta: step 4 has changed row 4, has added row 104, and has lost row 0."""
    return {"removed": [0], "delta": [step % 10, 100 + step]}


def saved_tables(target: FileTarget, step: int, base: checkpoint.SavedBase | None) -> SavedTables:
    """Writes what a server would write of the table; each number in a row is the step."""
    parts = {"": list(range(10))} if base is None else parts_of(step)
    files = [] if base is None else list(base.tables["ads"])
    for part, ids in parts.items():
        name = f"ads.{part}" if part else "ads"
        data = {"ids": torch.tensor(ids)}
        if part != "removed":
            data["weights"] = torch.full((len(ids), 2), float(step))
        with target.create(name) as sink:
            sink.write(safetensors.torch.save(data))
        files.append(TableFileEntry(name, 0, len(ids), part=part))
    entry = TableEntry(
        name="ads",
        dim=2,
        rows=10,
        rule="sgd",
        options={},
        initializer=("zeros", 0.0, 0.0),
        entry=None,
        ids=0,
        weights=[],
        files=files,
    )
    if base is None:
        return SavedTables([entry], name=f"of step {step}")
    return SavedTables([entry], base=base.entry)


def save(location: str | Path, step: int, *, keep: int = 1, every: int = EVERY) -> str:
    """As worker 0 saves; returns the kind of the save."""
    base = Bases(location, every).next()
    if base is not None and base.is_due:
        base = None
    made = dataclasses.replace(
        snapshot(step), save_tables=lambda target: saved_tables(target, step, base)
    )
    checkpoint.write(location, made, keep=keep)
    return "base" if base is None else "delta"


def found(location: str | Path, step: int, base: int) -> None:
    """The checkpoint is that of a step, and its table has the rows of the base but for changes."""
    assert whole_step(location) == step
    saved = checkpoint.read(location)
    [entry] = saved.manifest.tables
    table = saved.table(entry)
    rows = dict.fromkeys(range(10), float(base))
    if step != base:
        del rows[0]
        rows |= dict.fromkeys(parts_of(step)["delta"], float(step))
    assert table.ids.tolist() == sorted(rows)
    [weight] = table.weight().pieces()
    assert weight[:, 0].tolist() == [rows[one] for one in sorted(rows)]


def folders(location: str | Path) -> list[str]:
    if is_url(location):
        return sorted({e.name.partition("/")[0] for e in store_at(location).list("generation-")})
    return sorted(path.name for path in Path(location).glob("generation-*"))


@pytest.fixture(params=["folder", "file", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    path = tmp_path / "run"
    return path.as_uri() if request.param == "file" else str(path)


def test_every_third_save_is_a_base(location: str) -> None:
    for step, base in {1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 4, 7: 7}.items():
        assert save(location, step) == ("base" if step == base else "delta")
        found(location, step, base)
        assert len(folders(location)) == (1 if step == base else 2)
    assert "ads.delta" not in {e.name for e in checkpoint.read(location).manifest.files}


def test_the_base_of_an_earlier_generation_stays(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    for step in range(1, 6):
        save(url, step, keep=3)
    # the generations 5, 4 and 3, which needs 1
    assert [name[11:17] for name in folders(url)] == ["000001", "000003", "000004", "000005"]
    kept = maintenance.generations(url)
    assert [one.generation for one in kept] == [5, 4, 3]
    for one in kept:
        maintenance.verify(url, one, lambda name: None)
    assert maintenance.prune(url, 2) == 2
    assert [name[11:17] for name in folders(url)] == ["000004", "000005"]
    assert maintenance.prune(url, 1) == 0
    found(url, 5, 4)


def test_a_delta_is_copied_with_its_base(location: str, tmp_path: Path) -> None:
    save(location, 1)
    save(location, 2)
    for to in (tmp_path / "copied", (tmp_path / "stored").as_uri()):
        maintenance.copy(location, to, None, lambda name: None)
        shutil.rmtree(location, ignore_errors=True)
        assert len(folders(to)) == 1
        found(to, 2, 1)
        # no server knows what changed since
        assert Bases(to, EVERY).next() is None
        location = str(to)


def test_list_and_verify_know_deltas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path.as_uri()
    save(url, 1)
    save(url, 2, keep=2)
    assert main(["checkpoints", "list", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("changes since generation 1")
    assert "changes" not in lines[2]
    path = tmp_path / folders(url)[0] / "ads"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert main(["checkpoints", "verify", url]) == 1
    assert "ads was changed after it was written" in capsys.readouterr().out


def test_a_file_of_the_base_that_is_gone_makes_the_next_save_a_base(location: str) -> None:
    save(location, 1)
    save(location, 2)
    base = folders(location)[0]
    if is_url(location):
        store_at(location).delete([f"{base}/ads"])
    else:
        Path(location, base, "ads").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"ads is missing, but manifest\.json"):
        checkpoint.read(location).verify()
    assert save(location, 3) == "base"
    found(location, 3, 3)


def test_a_delta_that_was_killed_leaves_the_previous_one(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    save(url, 1)
    save(url, 2)
    killed = new_stored_generation(url, FORMAT, 1).__enter__()
    with killed.create("ads.delta") as sink:
        sink.write(b"half")
    found(url, 2, 1)
    assert save(url, 3) == "delta"
    found(url, 3, 1)
    assert len(folders(url)) == 2, "the remains are gone, the base is not"


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_base_that_another_job_has_replaced_is_refused(tmp_path: Path, kind: str) -> None:
    location = tmp_path.as_uri() if kind == "url" else str(tmp_path)
    save(location, 1)
    base = Bases(location, EVERY).next()
    save(location, 2, every=1)
    late = dataclasses.replace(
        snapshot(3), save_tables=lambda target: saved_tables(target, 3, base)
    )
    with pytest.raises(CheckpointError, match="generation 1, which this save needs as its base"):
        checkpoint.write(location, late)
    found(location, 2, 2)
    assert len(folders(location)) == 1


def test_a_save_without_deltas_names_no_base(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    assert not {"base", "name"} & set(json.loads((tmp_path / "manifest.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("is_due", [False, True])
def test_a_save_killed_at_any_change_of_the_disk_leaves_a_whole_checkpoint(
    tmp_path: Path, is_due: bool
) -> None:
    """The old delta or the new save, and the base that it needs."""
    script = f"""
import os, shutil, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fleetlight import checkpoint
from tests.checkpoint.states import WatchedOs
from tests.checkpoint.test_deltas import folders, found, save

root, call, finished, outcomes = {str(tmp_path / "ckpt")!r}, 0, False, set()
while not finished:
    call += 1
    shutil.rmtree(root, ignore_errors=True)
    save(root, 1)
    save(root, 2)
    pid = os.fork()
    if pid == 0:
        def kill(number, name, args):
            if number == call:
                os.kill(os.getpid(), signal.SIGKILL)
        WatchedOs(kill).install()
        save(root, 3, every={2 if is_due else 3})
        os._exit(0)
    finished = os.waitpid(pid, 0)[1] == 0
    step = checkpoint.read(root).manifest.step
    found(root, step, 3 if step == 3 and {is_due} else 1)
    outcomes.add(step)
    save(root, 4, every=9)
    assert len(folders(root)) == 2, folders(root)
assert outcomes == {{2, 3}}, outcomes
assert call > 20, call
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_table_stats_of_a_delta_are_those_of_its_base(
    location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(location, 1)
    save(location, 2)
    assert main(["table", "stats", location]) == 0
    text = capsys.readouterr().out
    assert "table ads: 10 rows of dim 2, sgd" in text
    assert "  changed since this base: 2 rows, 0.0 MiB; 1 removed" in text
    assert "  server 0: 10 rows" in text
