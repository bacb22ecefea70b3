# SPDX-License-Identifier: Apache-2.0
"""`fleetlight table stats` on folders and URLs."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.checkpoint.states import snapshot, whole_step
from tests.ps.made_tables import LR, ones, table_plan
from tests.store.s3 import FaultProxy

from fleetlight import checkpoint
from fleetlight.checkpoint.snapshot import SavedTables
from fleetlight.checkpoint.storage import maintenance
from fleetlight.checkpoint.storage import table_stats as stats
from fleetlight.checkpoint.storage.files import FileTarget
from fleetlight.checkpoint.storage.maintenance import copy
from fleetlight.checkpoint.storage.manifest import FORMAT, FileEntry, TableEntry, TableFileEntry
from fleetlight.checkpoint.storage.stored_generations import new_stored_generation
from fleetlight.cli.fleetlight import main
from fleetlight.cli.terminal import output
from fleetlight.kernels import buckets, servers_of
from fleetlight.ps.plan import EntryPlan, TablePlan
from fleetlight.ps.tables.counts import admission
from fleetlight.ps.tables.table import Table
from fleetlight.store import store_at

Capture = pytest.CaptureFixture[str]

FILTERED = table_plan(name="rare", entry=EntryPlan("count", 2.0))
IDS = np.arange(1000)
PLAIN = table_plan(name="plain")
COUNTED = table_plan(name="ads", entry=EntryPlan("show_click"), max_rows=10_000, evict="age")


def trained(plan: TablePlan, server: int) -> Table:
    """Each id has as many shows as its last digit, and the last push had the ids below 500."""
    table = Table(plan, 7, server_num=2)
    mine = IDS[servers_of(IDS, 2) == server]
    shows = (mine % 10).astype(np.float32)
    for ids in (mine, mine[mine < 500]):
        table.pull(ids, insert=True)
    for ids in (mine, mine[mine < 500]):
        counts = shows[: len(ids)] / (1 if ids is mine else np.inf), np.zeros(len(ids), np.float32)
        table.push(ids, ones(len(ids)), LR, 0, *counts)
    return table


def saved(location: str | Path, *plans: TablePlan) -> None:
    def save(target: FileTarget) -> SavedTables:
        entries, files = [], []
        for number, plan in enumerate(plans):
            parts = []
            for server in range(2):
                table = trained(plan, server)
                name = f"{plan.name}-{server}"
                file = table.save(table.cut(), number, Path(target.location), name)
                parts.append(TableFileEntry(name, server, file.rows))
                files.append(FileEntry(name, file.bytes, file.sha256))
            rows = sum(part.rows for part in parts)
            kept = {"eps": 1e-8} if plan is COUNTED else {}
            entries.append(
                TableEntry(
                    name=plan.name,
                    dim=plan.dim,
                    rows=rows,
                    rule=plan.rule.name,
                    options=kept,
                    initializer=("zeros", 0.0, 0.0),
                    entry=plan.entry and (plan.entry.kind, plan.entry.value),
                    ids=0,
                    weights=[],
                    files=parts,
                )
            )
        return SavedTables(entries, files)

    checkpoint.write(location, dataclasses.replace(snapshot(3), save_tables=save))


def said(capsys: Capture, *argv: str, code: int = 0) -> list[str]:
    assert main(argv) == code
    out, error = capsys.readouterr()
    return (out or error).splitlines()


def test_the_statistics_of_each_table(tmp_path: Path, capsys: Capture) -> None:
    saved(tmp_path, PLAIN, COUNTED)
    lines = said(capsys, "table", "stats", str(tmp_path))
    [first, second] = [n for n, line in enumerate(lines) if line.startswith("table ")]
    plain, counted = lines[first:second], lines[second:]
    assert plain[0] == "table plain: 1,000 rows of dim 3, sgd, 0.3 MiB"
    of_servers = np.bincount(servers_of(IDS, 2)).tolist()
    for server, rows in enumerate(of_servers):
        assert plain[1 + server].startswith(f"  server {server}: {rows} rows, 0.1 MiB, ")
        assert plain[1 + server].endswith(f"{rows / 500:.3f} of the average")
    most = np.bincount(buckets(IDS)).max()
    assert plain[3] == f"  16,384 buckets: 0 to {most} rows, 0.06 on average"
    assert len(plain) == 4
    assert counted[0].startswith("table ads: 1,000 rows of dim 3, sgd (eps 1e-08), ")
    assert counted[4].split()[:8] == ["counts", "of", "all", "rows", "0", "%", "10", "%"]
    # columns are two spaces apart, and names have single ones
    rows = (re.split(" {2,}", line) for line in counted[5:])
    quantiles = {name: values for name, *values in rows}
    assert quantiles == {
        "shows": ["0", "0.9", "4.5", "8.1", "9", "9"],
        "clicks": ["0"] * 6,
        "unseen days": ["0"] * 6,
        "pushes since its last": ["0", "0", "0.5", "1", "1", "1"],
    }


def test_the_statistics_follow_the_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, COUNTED)
    monkeypatch.setattr(output, "columns", lambda stream=None: 40)
    lines = said(capsys, "table", "stats", str(tmp_path))
    assert all(len(line) <= 40 for line in lines)
    text = "\n".join(lines)
    assert " ".join(text.split()).startswith("table ads: 1,000 rows of dim 3, sgd (eps 1e-08), ")
    assert "\nshows\n  0 %: 0\n  10 %: 0.9\n" in text


def test_the_part_that_an_entry_admits(tmp_path: Path, capsys: Capture) -> None:
    saved(tmp_path, FILTERED)
    assert said(capsys, "table", "stats", str(tmp_path))[-1] == "  admitted: 50.0 % of the rows"


def test_one_table_under_a_url(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "run").as_uri()
    saved(tmp_path / "folder", PLAIN, COUNTED)
    copy(tmp_path / "folder", url, None, lambda name: None)
    # less than a header
    monkeypatch.setattr(stats, "_HEAD", 16)
    monkeypatch.setattr(stats, "MAX_ROWS", 100)
    lines = said(capsys, "table", "stats", url, "ads")
    assert len(lines) == 9
    assert lines[4].split()[:5] == ["counts", "of", lines[4].split()[2], "rows,", "by"]
    assert 98 <= int(lines[4].split()[2]) <= 100
    assert (
        "no table 'abs'; did you mean 'ads'"
        in said(capsys, "table", "stats", url, "abs", code=1)[0]
    )
    assert "no generation 9" in said(capsys, "table", "stats", url, "--generation", "9", code=1)[0]


def test_a_checkpoint_without_tables(tmp_path: Path, capsys: Capture) -> None:
    checkpoint.write(tmp_path, snapshot(3))
    assert said(capsys, "table", "stats", str(tmp_path)) == ["step 3: no tables"]


def test_a_file_that_is_no_table(tmp_path: Path, capsys: Capture) -> None:
    saved(tmp_path, PLAIN)
    for path in tmp_path.glob("*/plain-0"):
        data = bytearray(path.read_bytes())
        data[8:12] = b"none"
        path.write_bytes(data)
    [line] = said(capsys, "table", "stats", str(tmp_path), code=1)
    assert "plain-0 is not the file of a table" in line


def test_the_columns_are_those_of_the_servers() -> None:
    names = ("SHOWS", "CLICKS", "UNSEEN", "ADMITTED", "LAST")
    theirs = ("SEEN", "CLICKS", "UNSEEN_DAYS", "LET_IN", "LAST")
    for mine, other in zip(names, theirs, strict=True):
        assert getattr(stats, mine) == getattr(admission, other)


def test_it_starts_without_torch(tmp_path: Path) -> None:
    saved(tmp_path, COUNTED)
    code = (
        "import sys; from fleetlight.cli.fleetlight import main; "
        f"main(['table', 'stats', {str(tmp_path)!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- `fleetlight checkpoints` on folders and URLs


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Steps 1 to 3, of which the last two are kept."""
    for step in (1, 2, 3):
        checkpoint.write((tmp_path / "run").as_uri(), snapshot(step), keep=2)
    return (tmp_path / "run").as_uri()


def test_list_prints_a_line_for_each_generation(url: str, tmp_path: Path, capsys: Capture) -> None:
    head, *lines = said(capsys, "checkpoints", "list", url)
    assert head.split()[0] == "generation"
    assert [(line.split()[0], line.split()[3]) for line in lines] == [("3", "3"), ("2", "2")]
    assert "1 worker" in lines[0]
    checkpoint.write(tmp_path / "folder", snapshot(7))
    assert said(capsys, "checkpoints", "list", str(tmp_path / "folder"))[1].split()[3] == "7"
    assert (
        "no such directory" in said(capsys, "checkpoints", "list", str(tmp_path / "no"), code=1)[0]
    )


def test_the_list_follows_the_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(tmp_path, snapshot(7))
    [plain] = maintenance.generations(tmp_path)
    large = msgspec.structs.replace(plain, workers=1000, servers=16)
    monkeypatch.setattr(maintenance, "generations", lambda location: [large])
    [_, line] = said(capsys, "checkpoints", "list", str(tmp_path))
    assert line.endswith("  3      1000 workers, 16 servers, 0 rows"), "a pipe gets whole lines"
    monkeypatch.setattr(output, "columns", lambda stream=None: 40)
    lines = said(capsys, "checkpoints", "list", str(tmp_path))
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "1"
    assert "  step: 7" in lines
    assert lines[-1] == "  job: 1000 workers, 16 servers, 0 rows"


def test_verify_finds_a_changed_byte(url: str, capsys: Capture) -> None:
    assert said(capsys, "checkpoints", "verify", "--all", url) == [
        "generation 3: 3 files as they were written",
        "generation 2: 3 files as they were written",
    ]
    saved = checkpoint.read(url).manifest
    assert isinstance(saved.earlier, list)
    name = f"{saved.earlier[0].folder}/model.safetensors"
    data = bytearray(store_at(url).get(name).data)
    data[-1] ^= 1
    store_at(url).put(name, data)
    assert len(said(capsys, "checkpoints", "verify", url)) == 1, "the current one is as it was"
    lines = said(capsys, "checkpoints", "verify", "--all", url, code=1)
    assert "model.safetensors was changed after it was written" in lines[1]


def test_prune_keeps_the_last_generations(url: str, capsys: Capture) -> None:
    killed = new_stored_generation(url, FORMAT, 1).__enter__()
    assert said(capsys, "checkpoints", "prune", "--keep", "2", url) == ["removed 0 folders"], (
        "it may still save"
    )
    with killed.create("a") as sink:
        sink.write(b"")
    assert said(capsys, "checkpoints", "prune", url) == ["removed 1 folder"]
    assert len(said(capsys, "checkpoints", "list", url)) == 2
    assert said(capsys, "checkpoints", "verify", "--all", url) == [
        "generation 3: 3 files as they were written"
    ]
    assert whole_step(url) == 3
    assert (
        "expected at least 1" in said(capsys, "checkpoints", "prune", "--keep", "0", url, code=1)[0]
    )


def test_prune_of_a_folder_removes_remains(tmp_path: Path, capsys: Capture) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    (tmp_path / "generation-000009").mkdir()
    assert said(capsys, "checkpoints", "prune", str(tmp_path)) == ["removed 1 folder"]
    assert whole_step(tmp_path) == 1
    assert said(capsys, "checkpoints", "prune", str(tmp_path / "none"), code=1)
    assert not (tmp_path / "none").exists()


def test_copies_are_the_checkpoint(
    url: str, bucket: str, s3: FaultProxy, tmp_path: Path, capsys: Capture
) -> None:
    folder = str(tmp_path / "folder")
    assert (
        said(capsys, "checkpoints", "copy", url, bucket)[-1]
        == f"copied step 3 to {bucket}, as generation 1"
    )
    assert whole_step(bucket) == 3
    said(capsys, "checkpoints", "copy", "--generation", "2", url, bucket)
    assert whole_step(bucket) == 2
    said(capsys, "checkpoints", "copy", bucket, folder)
    assert whole_step(folder) == 2
    # the folder is as any other: the next save replaces the copy
    checkpoint.write(folder, snapshot(5))
    assert whole_step(folder) == 5
    assert len(list(Path(folder).glob("generation-*"))) == 1
    assert (
        "has no generation 9; it has 3, 2"
        in said(capsys, "checkpoints", "copy", "--generation", "9", url, folder, code=1)[0]
    )


def test_a_damaged_checkpoint_is_not_copied(url: str, tmp_path: Path, capsys: Capture) -> None:
    name = f"{checkpoint.read(url).manifest.folder}/optimizer.safetensors"
    store_at(url).put(name, b"something else")
    lines = said(capsys, "checkpoints", "copy", url, str(tmp_path / "copy"), code=1)
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
