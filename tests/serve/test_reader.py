# SPDX-License-Identifier: Apache-2.0
"""`Reader`: rows of the newest publication, and what it refuses."""

import mmap
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.serve.target import DIM, TABLE, Target

from fleetlight.errors import ConfigError, PublicationError
from fleetlight.kernels import Initializer, first_values, from_bfloat16, to_bfloat16
from fleetlight.publication import row_file
from fleetlight.publication.manifest import MANIFEST
from fleetlight.serve import Reader, layer_file
from fleetlight.serve import reader as reading

IDS = np.arange(-5, 25)
Read = Callable[..., Reader]


def first(ids: Any) -> Any:
    return first_values(np.asarray(ids, np.int64), DIM, TABLE.seed, Initializer("uniform", -1, 1))


def check(reader: Reader, target: Target, ids: Any = IDS) -> None:
    """All rows of a reader are those of the target."""
    want = first(ids)
    for at, one in enumerate(np.asarray(ids).tolist()):
        if one in target.expected:
            want[at] = target.expected[one]
    assert np.array_equal(reader.lookup("emb", ids), want)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    made = Target(tmp_path / "target")
    made.base({0: 1.0, 1: 2.0, 2: 3.0, 17: 4.0})
    return made


@pytest.fixture
def read(tmp_path: Path, target: Target) -> Read:
    """Open a reader that looks for publications when it is asked."""

    def opened(**options: Any) -> Reader:
        usual = {"follow": False, "wait_s": 0.0, "cache": tmp_path / "cache"}
        return Reader(target.folder, **{**usual, **options})

    return opened


def test_lookups_follow_publications(target: Target, read: Read) -> None:
    reader = read()
    check(reader, target)
    assert not reader.refresh()
    target.delta({1: 7.0, 5: 8.0}, removed=[0, 99])
    before = reader.view
    assert reader.refresh()
    check(reader, target)
    assert (reader.number, reader.step, reader.epoch) == (2, 20, 1)
    assert reader.dense["bias"].tolist() == [2, 2]
    # a view does not change
    assert before.lookup("emb", [1]).tolist() == [[2.0] * DIM]
    assert (before.number, before.dense["bias"].tolist()) == (1, [1, 1])


def test_lookup_keeps_the_shape_of_ids_and_takes_memory(read: Read) -> None:
    reader = read()
    assert reader.lookup("emb", [[0, 1], [2, 0]]).tolist()[1] == [[3.0] * DIM, [1.0] * DIM]
    assert reader.lookup("emb", 17).tolist() == [4.0] * DIM
    out = np.empty((2, DIM), np.float32)
    assert reader.lookup("emb", [0, 1], out) is out
    assert out[:, 0].tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match="there is no table 'em'; did you mean 'emb'"):
        reader.lookup("em", [1])
    with pytest.raises(ConfigError, match=r"out is float32\[2, 3\], expected"):
        reader.lookup("emb", [0, 1, 2], out)


@pytest.mark.parametrize("form", ["f16", "int8"])
def test_rows_of_other_forms(tmp_path: Path, form: str) -> None:
    target = Target(tmp_path / "target", msgspec.structs.replace(TABLE, form=form))
    target.base({i: float(i) for i in range(200)})
    with Reader(target.folder, cache=tmp_path / "cache", follow=False) as reader:
        got = reader.lookup("emb", np.arange(200))
    assert np.allclose(got, np.arange(200)[:, None], atol=0.5 if form == "int8" else 0)


def test_an_unknown_id_of_a_bfloat16_table_gets_a_rounded_first_value(tmp_path: Path) -> None:
    target = Target(tmp_path / "target", msgspec.structs.replace(TABLE, dtype="bf16"))
    target.base({})
    with Reader(target.folder, cache=tmp_path / "cache", follow=False) as reader:
        assert np.array_equal(reader.lookup("emb", IDS), from_bfloat16(to_bfloat16(first(IDS))))


ids = st.integers(-5, 24)
rows = st.dictionaries(ids, st.floats(-8, 8, width=16), max_size=12)
steps = st.lists(st.tuples(st.booleans(), rows, st.sets(ids, max_size=8)), max_size=6)


@settings(deadline=None)
@example([(False, {3: 1.0}, {3, 1}), (False, {1: 2.0}, set()), (True, {}, set())])
@given(steps)
def test_base_deltas_and_removals_equal_the_table(
    steps: list[tuple[bool, dict[int, float], set[int]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder, "target"))
        target.base({1: 1.0, 3: 3.0})
        follower = Reader(target.folder, cache=Path(folder, "a"), follow=False)
        for is_base, values, removed in steps:
            if is_base:
                target.base(values)
            else:
                target.delta(values, removed)
            # some publications are read with the next one
            if len(values) % 3:
                follower.refresh()
                check(follower, target)
        follower.refresh()
        check(follower, target)
        # a reader that starts late reads the whole chain at once
        check(Reader(target.folder, cache=Path(folder, "b"), follow=False), target)


def test_one_reader_builds_and_the_others_map(
    read: Read, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.delta({4: 1.0})
    built = []

    class Counting(reading.LayerWriter):
        def finish(self) -> None:
            built.append(self.used)
            super().finish()

    monkeypatch.setattr(reading, "LayerWriter", Counting)
    readers = [read() for _ in range(3)]
    assert built == [4, 1]
    target.delta({5: 1.0})
    for reader in readers:
        reader.refresh()
        check(reader, target)
    # the layer of a delta continues that of the one before it
    assert built == [4, 1, 2]


def test_old_layers_are_deleted(
    read: Read, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_GRACE_S", -1.0)
    reader = read()
    for number in range(4):
        target.delta({number: 1.0})
        reader.refresh()
    names = {path.name for path in (tmp_path / "cache").rglob("*.layer")}
    assert names == {"id1-emb.layer", "id4-emb.layer", "id5-emb.layer"}


def test_what_a_killed_process_fetched_is_deleted(
    read: Read, target: Target, tmp_path: Path
) -> None:
    reader = read()
    [folder] = (tmp_path / "cache").iterdir()
    (folder / "fetch-killed").mkdir()
    (folder / "fetch-killed" / "file").write_bytes(b"half a file")
    target.delta({1: 5.0})
    reader.refresh()
    assert not list(folder.glob("fetch-*"))


def test_layers_of_before_a_power_failure_are_built_again(
    read: Read, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages may not have reached the disk."""
    target.delta({5: 5.0})
    read()
    for path in (tmp_path / "cache").rglob("*.layer"):
        data = bytearray(path.read_bytes())
        # rows are lost, of one layer the first page, too
        data[mmap.PAGESIZE if "id1" in path.name else 0 :] = bytes(
            len(data) - (mmap.PAGESIZE if "id1" in path.name else 0)
        )
        path.write_bytes(data)
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.write_bytes(b"")
    monkeypatch.setattr(layer_file, "_boot", lambda: "the next start")
    reader = read()
    check(reader, target)
    assert reader.dense["bias"].tolist() == [2, 2]


# -- refusals


def refused(reader: Reader, target: Target, text: str) -> None:
    """The newest publication is refused, and lookups continue with the one before it."""
    before = reader.number
    with pytest.raises(PublicationError, match=text):
        reader.refresh()
    assert isinstance(reader.error, PublicationError)
    assert reader.number == before
    assert reader.lookup("emb", [1]).tolist() == [[2.0] * DIM]


def test_a_missing_delta_is_refused(target: Target, read: Read) -> None:
    reader = read()
    target.delta({1: 5.0})
    target.edit(deltas=[target.delta({1: 6.0})])
    refused(reader, target, "delta 3 follows 'id2'.* a delta is missing")


def test_a_delta_that_is_there_twice_is_refused(target: Target, read: Read) -> None:
    reader = read()
    delta = target.delta({1: 5.0})
    target.edit(deltas=[delta, delta])
    refused(reader, target, "delta 2 comes after publication 2.* twice or out of order")


def test_a_delta_of_another_chain_is_refused(target: Target, read: Read) -> None:
    reader = read()
    target.edit(deltas=[msgspec.structs.replace(target.delta({1: 5.0}), previous="other")])
    refused(reader, target, "delta 2 follows 'other', but publication 1 before it is 'id1'")


def test_a_replaced_delta_is_refused(target: Target, read: Read) -> None:
    target.delta({5: 5.0})
    reader = read()
    assert target.manifest is not None
    [delta] = target.manifest.deltas
    target.edit(deltas=[msgspec.structs.replace(delta, id="other")])
    refused(reader, target, "publication 2 was 'id2' before, and is 'other' now")


def test_another_base_of_the_same_number_is_refused(target: Target, read: Read) -> None:
    reader = read()
    assert target.manifest is not None
    target.edit(base=msgspec.structs.replace(target.manifest.base, id="other"))
    refused(reader, target, "publication 1 was 'id1' before, and is 'other' now")


@pytest.mark.parametrize("facts", [{"epoch": 0}, {"deltas": []}])
def test_a_stale_publication_is_refused(target: Target, read: Read, facts: dict[str, Any]) -> None:
    target.delta({5: 5.0})
    reader = read()
    target.edit(**facts)
    refused(reader, target, "publication 2 of epoch 1 was read before: it is stale")


def test_a_publication_without_the_file_of_a_server_is_refused(target: Target, read: Read) -> None:
    reader = read()
    delta = target.delta({1: 5.0})
    target.edit(deltas=[msgspec.structs.replace(delta, files=delta.files[:1])])
    refused(reader, target, r"publication 2 has the files .*\('emb', 0\)\], expected .*'emb', 1")


def test_a_name_outside_the_target_is_refused(target: Target, read: Read) -> None:
    reader = read()
    delta = target.delta({1: 5.0})
    dense = msgspec.structs.replace(delta.dense, name="../secret")
    target.edit(deltas=[msgspec.structs.replace(delta, dense=dense)])
    refused(reader, target, "names '../secret', expected a file below the target")


@pytest.mark.parametrize("which", ["rows", "dense"])
def test_a_wrong_checksum_is_refused(target: Target, read: Read, which: str) -> None:
    reader = read()
    delta = target.delta({1: 5.0})
    name = delta.files[1].name if which == "rows" else delta.dense.name
    data = bytearray((target.folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (target.folder / name).write_bytes(data)
    refused(reader, target, f"{name} is damaged: its sha256 is")


def test_a_file_that_arrived_half_is_refused(target: Target, read: Read) -> None:
    reader = read()
    path = target.folder / target.delta({1: 5.0}).dense.name
    path.write_bytes(path.read_bytes()[:10])
    refused(reader, target, r"dense\.safetensors is damaged: it has 10 bytes, expected")


def test_an_id_in_two_files_is_refused(target: Target, read: Read) -> None:
    reader = read()
    delta = target.delta({1: 5.0})
    # server 0 sends the file of server 1
    files = [msgspec.structs.replace(delta.files[1], server=0), delta.files[1]]
    target.edit(deltas=[msgspec.structs.replace(delta, files=files)])
    refused(reader, target, "1 ids of table 'emb' are in publication 2 twice")
    assert target.manifest is not None
    base = msgspec.structs.replace(target.manifest.base, id="b", files=files, number=9)
    target.edit(base=base, deltas=[])
    refused(reader, target, "1 ids of table 'emb' are in publication 9 twice")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{", "is damaged"),
        (b'{"format": "other"}', "is damaged"),
        (None, "has the format 'other', version 1, expected 'fleetlight-publication'"),
    ],
)
def test_a_damaged_manifest_is_refused(
    target: Target, read: Read, data: bytes | None, text: str
) -> None:
    reader = read()
    if data is None:
        target.edit(format="other")
    else:
        target.store.put(MANIFEST, data)
    refused(reader, target, text)


def test_a_base_that_is_gone_is_read_again_from_the_newest(
    target: Target, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = read(cache=target.folder.parent / "other")
    old = target.delta({1: 5.0})
    get = reader._store.get_ranges

    def replaced_meanwhile(name: str, spans: Any) -> Any:
        # the publisher compacts while the reader reads
        if name in {file.name for file in old.files} and target.expected != {3: 3.0}:
            target.store.delete(file.name for file in old.files)
            target.base({3: 3.0})
        return get(name, spans)

    monkeypatch.setattr(reader._store, "get_ranges", replaced_meanwhile)
    assert reader.refresh()
    assert reader.number == 3
    check(reader, target)


def test_a_file_that_is_gone_without_a_newer_publication(target: Target, read: Read) -> None:
    reader = read()
    target.store.delete([target.delta({1: 5.0}).files[0].name])
    refused(reader, target, "names a file that is gone, and there is no newer publication")


# -- before the first publication


def test_a_reader_without_a_publication_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(PublicationError, match=r"no publication after 0 s; check the URL"):
        Reader(tmp_path / "nothing", cache=tmp_path / "cache", wait_s=0.0)


def test_a_reader_waits_for_the_first_publication(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(tmp_path / "target")
    found: list[Reader] = []

    def read() -> None:
        found.append(Reader(target.folder, cache=tmp_path / "cache", wait_s=60.0, follow=False))

    thread = threading.Thread(target=read)
    with caplog.at_level("INFO", "fleetlight"):
        thread.start()
        while "waiting up to 60 s for the first publication" not in caplog.text:
            time.sleep(0.01)
        target.base({1: 2.0})
        thread.join(60)
    check(found[0], target)


def test_age_is_that_of_the_cut(tmp_path: Path) -> None:
    target = Target(tmp_path / "target")
    target.base({}, time=time.time() - 100)
    with Reader(target.folder, cache=tmp_path / "cache") as reader:
        assert 100 <= reader.age_s < 200
        target.base({}, time=time.time() + 1e6)
        while reader.number == 1:
            time.sleep(0.01)
        # the clock of another machine may be ahead
        assert reader.age_s == 0


def test_a_reader_that_follows_logs_an_error_once(
    target: Target, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    with read(follow=True, period_s=0.005) as reader:
        target.edit(epoch=0)
        while reader.error is None:
            time.sleep(0.001)
        target.base({5: 5.0})
        while reader.number == 1:
            time.sleep(0.001)
    assert reader.error is None
    check(reader, target)
    assert caplog.text.count("publication 1 stays in use") == 1


def test_serving_imports_no_torch() -> None:
    code = "import sys, fleetlight.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_pyarrow_the_error_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'pip install "fleetlight\[data\]"'):
        Reader(tmp_path)
    with pytest.raises(ConfigError, match=r'pip install "fleetlight\[data\]"'):
        row_file.write_rows(tmp_path / "x", 1, "f32", [], np.empty(0, np.int64))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"wait_s": -1}, "got wait_s=-1, expected a number of seconds of 0 or more"),
        ({"period_s": 0}, "got period_s=0, expected a number of seconds above 0"),
        ({"period_s": "1"}, "got period_s='1'"),
        ({"wait_s": float("nan")}, "got wait_s=nan"),
    ],
)
def test_wrong_times_are_refused(arguments: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Reader(tmp_path, **arguments)
