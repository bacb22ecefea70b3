# SPDX-License-Identifier: Apache-2.0
"""`webdataset`: samples, fields, and one clear error for each damaged file."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.columns.making import numbers, shards
from tests.data.queued import records, run, workers_of
from tests.data.tars.making import array_bytes, numbered, sample, tar_bytes
from tests.errors import refuses
from tests.store.s3 import FaultProxy
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data import TarFiles
from fleetlight.data.tars import shard
from fleetlight.data.tars.members import TarMember, members
from fleetlight.data.tars.shard import key_of
from fleetlight.errors import ConfigError, DataError
from fleetlight.store import store_at

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(*members: tuple[str, bytes], name: str = "a.tar") -> Path:
        path = tmp_path / name
        path.write_bytes(tar_bytes(members))
        return path

    return _write


def picture(form: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (255, 0, 0)).save(file, form)
    return file.getvalue()


def test_members_are_decoded_by_their_extension(write: Write) -> None:
    path = write(
        ("7.json", b'{"a": [1]}'),
        ("7.CLS", b" 12\n"),
        ("7.txt", "Straße".encode()),
        ("7.npy", array_bytes(np.arange(3))),
        ("7.png", picture("png")),
        ("7.left.jpeg", picture("jpeg")),
        ("7.flac", b"\0\1"),
    )
    one = fleet.data.webdataset(path)[0]
    assert (one["json"], one["cls"], one["txt"], one["flac"]) == ({"a": [1]}, 12, "Straße", b"\0\1")
    assert one["npy"].tolist() == [0, 1, 2]
    assert one["png"].dtype == torch.uint8
    assert one["png"].shape == one["left.jpeg"].shape == (3, 4, 6)
    assert one["png"][:, 0, 0].tolist() == [255, 0, 0]


def test_fields_have_names_and_alternatives(write: Write) -> None:
    path = write(("a.jpg", b"1"), ("a.cls", b"5"), ("b.cls", b"6"), ("b.png", b"2"))
    fields = {"image": "jpg;png", "label": "cls", "key": "__key__"}
    data = fleet.data.webdataset(path, fields, decode={"jpg": bytes, "png": bytes.hex})
    assert data[0] == {"image": b"1", "label": 5, "key": "a"}
    assert data[-1] == {"image": "32", "label": 6, "key": "b"}


def test_transform_gets_each_sample(write: Write) -> None:
    path = write(*sample(3), *sample(4))
    data = fleet.data.webdataset(path, ["cls"], transform=lambda one: one["cls"] * 10)
    assert [data[n] for n in range(2)] == [30, 40]
    assert next(iter(data.loader(2))).tolist() == [30, 40]


def test_batches_are_collated_as_usual(tmp_path: Path) -> None:
    data = fleet.data.webdataset(numbered(tmp_path, [5, 4]), ["cls", "npy"])
    batches = list(data.loader(4))
    assert [batch["cls"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert batches[0]["npy"].shape == (4, 3)
    assert repr(data) == f"<{tmp_path}/train-000.tar and 1 more: 9 samples>"
    plain = DataLoader(data, 4, shuffle=True)
    assert sorted(torch.cat([batch["cls"] for batch in plain]).tolist()) == list(range(9))


def test_names_with_braces_are_files_in_turn(tmp_path: Path) -> None:
    numbered(tmp_path, [1] * 12)

    def labels(name: str) -> list[int]:
        data = fleet.data.webdataset(f"{tmp_path}/{name}", ["cls"])
        return [data[n]["cls"] for n in range(len(data))]

    assert labels("train-{002..004}.tar") == [2, 3, 4]
    assert labels("train-{011,000}.tar") == [11, 0]
    assert labels("train-0{0..1}{0..1}.tar") == [0, 1, 10, 11]
    assert labels("train-01*.tar") == [10, 11]
    with pytest.raises(DataError, match=r"train-012\.tar: no such file"):
        labels("train-{010..012}.tar")
    with pytest.raises(DataError, match=r"004 is larger than 002"):
        labels("train-{004..002}.tar")
    with pytest.raises(DataError, match=r"expected two whole numbers.*got \{a\.\.c\}"):
        labels("train-{a..c}.tar")


def test_group_is_a_stretch_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 4 * 3 * 1024)
    assert fleet.data.webdataset(numbered(tmp_path, [9, 3]), ["cls"]).group_rows == [4, 4, 1, 3]
    monkeypatch.setattr(shard, "GROUP_BYTES", 1)
    assert fleet.data.webdataset(tmp_path, ["cls"]).group_rows == [1] * 12


def test_loader_reads_groups_and_others_read_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetlight.data.locations.files import LocalFile

    monkeypatch.setattr(shard, "GROUP_BYTES", 10 * 3 * 1024)
    data = fleet.data.webdataset(numbered(tmp_path, [40]), ["cls"])
    spans: list[tuple[int, int]] = []
    plain = LocalFile.read

    def read(self: LocalFile, own: Any) -> Any:
        spans.extend(own)
        return plain(self, own)

    monkeypatch.setattr(LocalFile, "read", read)
    for batch in data.loader(7, shuffle=True, window=20):
        assert len(batch["cls"])
    assert len(spans) == 4
    spans.clear()
    assert [
        one["cls"] for one in fleet.data.webdataset(tmp_path, ["cls"]).__getitems__([31, 2])
    ] == [31, 2]
    assert [stop - start for start, stop in spans] == [3 * 1024] * 2


def test_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(tmp_path, [5, 4])
    kept = tmp_path / "index"
    first = fleet.data.webdataset(tmp_path, ["cls"], index=kept)
    monkeypatch.setattr(shard, "_starts", lambda file: pytest.fail(f"{file.name} is read again"))
    again = fleet.data.webdataset(tmp_path, ["cls"], index=kept)
    assert [again[n]["cls"] for n in range(9)] == list(range(9))
    assert again.fingerprint == first.fingerprint
    monkeypatch.undo()
    # another version of a file has another index
    (tmp_path / "train-001.tar").write_bytes(tar_bytes(sample(99)))
    assert fleet.data.webdataset(tmp_path, ["cls"], index=kept)[-1]["cls"] == 99
    for file in kept.iterdir():
        file.write_bytes(b"nonsense")
    with refuses(DataError, "index.npy: got a file that is no index of", "; delete it"):
        fleet.data.webdataset(tmp_path, ["cls"], index=kept)


def test_cut_off_and_empty_files_are_errors(write: Write, tmp_path: Path) -> None:
    path = write(*sample(1), *sample(2))
    path.write_bytes(path.read_bytes()[:4_610])
    with refuses(DataError, "a.tar: ends at byte 4610, expected 'train/000002.json'"):
        fleet.data.webdataset(path)
    write(name="a.tar")
    with pytest.raises(DataError, match=r"a\.tar: got no sample in 1 files"):
        fleet.data.webdataset(path)
    write(*sample(1), name="b.tar")
    assert len(fleet.data.webdataset(tmp_path)) == 1


def test_key_that_returns_is_an_error(write: Write) -> None:
    path = write(("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"1"))
    with refuses(DataError, "a.tar, member 'a.cls': the key 'a' has members at byte 0"):
        fleet.data.webdataset(path)
    path = write(("a.cls", b"1"), ("a.cls", b"2"))
    with pytest.raises(DataError, match=r"member 'a\.cls': the key 'a' has two members \.cls"):
        fleet.data.webdataset(path, ["cls"])[0]


def test_sample_without_a_field_is_an_error(write: Write) -> None:
    path = write(("a.cls", b"1"), ("a.jpg", b""), ("b.cls", b"2"), ("b.txt", b""))
    data = fleet.data.webdataset(path, {"image": "jpg;png"}, decode={"jpg": bytes})
    with pytest.raises(
        DataError,
        match=r"a\.tar, key 'b': got no member \.jpg or \.png for the field 'image', only \.cls",
    ):
        data[1]


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jpg", picture("jpeg")[:200]), ("x.json", b"{"), ("x.cls", b"cat"), ("x.npy", b"1")],
)
def test_member_that_cannot_be_decoded_is_named(write: Write, name: str, content: bytes) -> None:
    data = fleet.data.webdataset(write(("a.txt", b""), (name, content)), [name[2:]])
    with pytest.raises(
        DataError, match=rf"a\.tar, member '{name}', key 'x': \d+ bytes cannot be decoded as \."
    ):
        data[1]


def test_bad_image_is_described_once(write: Write) -> None:
    data = fleet.data.webdataset(write(("a.txt", b""), ("x.png", b"nothing")), ["png"])
    with pytest.raises(DataError) as raised:
        data[1]
    text = str(raised.value).partition("a.tar, ")[2]
    assert text == (
        "member 'x.png', key 'x': 7 bytes cannot be decoded as .png (not an image that Pillow "
        "knows); write the member again, or give a function of your own: decode={'png': ...}"
    )


def test_objects_in_arrays_are_refused(write: Write) -> None:
    data = fleet.data.webdataset(write(("a.npy", array_bytes(np.array([{}])))))
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        data[0]


def test_file_that_changes_is_an_error(write: Write) -> None:
    path = write(*sample(1))
    data = fleet.data.webdataset(path, ["cls"])
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"a\.tar: the file has changed since the job began"):
        data[0]


def test_wrong_arguments_are_errors(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(*sample(1))
    with pytest.raises(ConfigError, match=r"got fields='jpg', expected a list"):
        fleet.data.webdataset(path, "jpg")
    with pytest.raises(ConfigError, match="got no fields"):
        fleet.data.webdataset(path, [])
    with pytest.raises(IndexError, match="got sample 1, expected one of 1"):
        fleet.data.webdataset(path)[1]
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[images\]'"):
        fleet.data.webdataset(path, ["jpg"])
    assert isinstance(fleet.data.webdataset(path, ["jpg"], decode={"jpg": bytes}), TarFiles)


@pytest.mark.multiprocess
def test_example_of_the_page_runs(tmp_path: Path) -> None:
    members = [
        (f"{n}.{end}", picture(end.replace("jpg", "jpeg")))
        for n, end in enumerate(["png", "jpg", "png"])
    ]
    labelled = [(f"{n}.cls", b"7") for n in range(3)]
    pairs = [one for pair in zip(members, labelled, strict=True) for one in pair]
    (tmp_path / "a.tar").write_bytes(tar_bytes(pairs))
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "webdataset.md").read_text()
    program = (
        page.split("```python\n")[1].split("```")[0].replace("    ...", "    found = image, label")
    )
    program = program.replace("/lake/imagenet/train-{000000..001281}.tar", str(tmp_path / "a.tar"))
    program = program.replace("images =", "fleet.init(is_collective=True)\nimages =")
    done = subprocess.run(
        [sys.executable, "-c", f"{program}print([(x.shape, x.dtype) for x in found])"],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [(torch.Size([3, 3, 224, 224]), torch.float32), (torch.Size([3]), torch.int64)]
    assert done.stdout.strip() == str(expected), done.stderr


# -- headers of tars, against Python's tarfile, and what is no tar --------------------------------

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
names = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60),
    min_size=1,
    max_size=5,
).map("/".join)


def found(data: bytes, *, is_whole: bool = True) -> list[TarMember]:
    def read(at: int, size: int) -> bytes:
        return data[at : at + size]

    return list(members(read, 0, len(data), "a.tar", is_whole=is_whole))


def contents(data: bytes) -> list[tuple[str, bytes]]:
    return [(one.name, data[one.start : one.stop]) for one in found(data)]


@given(
    st.lists(st.tuples(names, st.binary(max_size=1_500)), max_size=6),
    st.sampled_from(["gnu", "pax"]),
)
def test_members_are_those_of_tarfile(given: Sequence[tuple[str, bytes]], form: str) -> None:
    data = tar_bytes(given, format=FORMATS[form])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    # tarfile strips the slashes at the end of a name
    assert [(name.rstrip("/"), one) for name, one in contents(data)] == expected


@pytest.mark.parametrize("form", FORMATS)
def test_long_names_are_read(form: str) -> None:
    given = [("folder/" * 20 + "name.jpg", b"1" * 600), ("b.jpg", b"")]
    data = tar_bytes(given, format=FORMATS[form])
    assert contents(data) == given
    # extending headers belong to their member
    assert [one.header for one in found(data)] == [0, found(data)[0].end]


def test_folders_and_links_are_skipped() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/l.jpg", tarfile.SYMTYPE), ("h", b"1")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "x"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("a/b.jpg"))
    assert [one.name for one in found(file.getvalue())] == ["a/b.jpg"]


def test_large_sizes_are_read() -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 9 << 33
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=f"'a.bin' at byte 0, which has {9 << 33} bytes"):
        found(header)


@pytest.mark.parametrize("left", [0, 100, 511, 512, 700, 1023, 1024, 1535])
def test_cut_off_tar_is_an_error(left: int) -> None:
    data = tar_bytes([("a.jpg", b"1" * 300), ("b.jpg", b"2" * 200)])
    with pytest.raises(DataError, match=f"a.tar: ends at byte {left}, expected .* is cut off"):
        found(data[:left])


def test_what_is_no_tar_is_an_error() -> None:
    data = tar_bytes([("a.jpg", b"1" * 300)])
    with pytest.raises(DataError, match=r"compressed with gzip, of which no part"):
        found(gzip.compress(data))
    with pytest.raises(DataError, match=r"got b'nonsense' at byte 0, expected a header"):
        found(b"nonsense" * 100)
    broken = bytearray(data)
    broken[3] ^= 1
    with pytest.raises(DataError, match="expected a header of a tar"):
        found(bytes(broken))


@given(st.binary(max_size=2_000), st.integers(0, 1_500), st.binary(max_size=40))
def test_damaged_tars_end_in_one_kind_of_error(noise: bytes, at: int, patch: bytes) -> None:
    data = bytearray(tar_bytes([("folder/" * 20 + "a.jpg", b"1" * 300)], format=tarfile.PAX_FORMAT))
    data[at : at + len(patch)] = patch
    for one in (noise, bytes(data)):
        with contextlib.suppress(DataError):
            found(one, is_whole=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("12.jpg", ("12", "jpg")),
        ("a.b/12.seg.PNG", ("a.b/12", "seg.png")),
        ("./a/12.cls", ("./a/12", "cls")),
        ("README", None),
        ("a/.hidden.jpg", None),
        ("__meta__.json", None),
    ],
)
def test_keys_end_at_the_first_point(name: str, expected: tuple[str, str] | None) -> None:
    assert key_of(name) == expected


# -- workers share tar files: every sample once, exact positions, with a queue, from a bucket -----

SIZES = [25, 7, 40, 13, 18]
FIELDS = {"number": "cls"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TarFiles]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "GROUP_BYTES", 10 * 3 * 1024)
        yield fleet.data.webdataset(numbered(tmp_path_factory.mktemp("tars"), SIZES), FIELDS)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_counts_once_an_epoch(data: TarFiles, workers: int, shuffle: bool) -> None:
    every = shards(data.loader(4, shuffle=shuffle, window=10), workers)
    for _ in range(2):
        read = [numbers(one) for one in every]
        assert sum(read, Counter()) == Counter(range(len(data)))
        assert max(one.total() for one in read) - min(one.total() for one in read) <= 4


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 7), st.integers(0, 12))),
    st.booleans(),
)
def test_other_workers_resume_at_any_sample(
    data: TarFiles, stops: list[tuple[int, int, int]], shuffle: bool
) -> None:
    read: Counter[int] = Counter()
    state: Any = None
    for workers, batch, steps in [*stops, (2, 3, 10**6)]:
        every = shards(data.loader(batch, shuffle=shuffle, window=20), workers)
        for one in every:
            if state is not None:
                one.load_state_dict(state)
            if steps and not one.epoch:
                read += numbers(one, steps)
        if every[0].epoch and every[0].consumed == 0:
            break
        state = every[0].state_dict()
    assert read == Counter(range(len(data)))


def test_loading_processes_read_their_own_samples(data: TarFiles) -> None:
    every = shards(data.loader(4, shuffle=True, window=20, num_workers=2), 2)
    for one, same in zip(every, shards(data.loader(4, shuffle=True, window=20), 2), strict=True):
        batches = [batch["number"].tolist() for batch in one]
        assert batches == [batch["number"].tolist() for batch in same]


def test_queue_deals_windows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 5 * 3 * 1024)
    read: list[int] = []
    plain = TarFiles._load
    monkeypatch.setattr(TarFiles, "_load", lambda self, n: read.append(n) or plain(self, n))
    data = fleet.data.webdataset(
        numbered(tmp_path, SIZES), ["cls"], transform=lambda one: one["cls"]
    )
    workers = workers_of(3, lambda: data.loader(4, shuffle=True, window=20), range_batches=5)
    run(workers)
    assert records(*workers) == list(range(len(data)))
    # the groups of each range, and not sample by sample
    assert set(read) == set(range(len(data.group_rows)))
    assert len(read) <= 3 * len(data.group_rows)


def test_shards_in_a_bucket_are_read(
    tmp_path: Path, bucket: str, s3: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 10 * 3 * 1024)
    store = store_at(bucket)
    for file in sorted(numbered(tmp_path, SIZES).iterdir()):
        store.put(f"clicks/{file.name}", file)
    kept = f"{bucket}/index"
    name = f"{bucket}/clicks/train-{{000..004}}.tar"
    assert len(fleet.data.webdataset(name, FIELDS, index=kept)) == sum(SIZES)
    before = s3.fetched()
    data = fleet.data.webdataset(name, FIELDS, index=kept)
    # indices and nothing else
    assert s3.fetched() - before < 5 * 1024
    for settings in ({"num_workers": 0}, {"shuffle": True, "window": 20}):
        read = sum((numbers(one) for one in shards(data.loader(4, **settings), 3)), Counter())
        assert read == Counter(range(sum(SIZES)))
    assert [one["number"] for one in data.__getitems__([99, 0, 42])] == [99, 0, 42]


def test_position_in_other_files_is_refused(data: TarFiles, tmp_path: Path) -> None:
    one = shards(data.loader(4), 1)[0]
    numbers(one, 2)
    other = shards(fleet.data.webdataset(numbered(tmp_path, [103]), FIELDS).loader(4), 1)[0]
    with refuses(fleet.errors.CheckpointError, "in the order '5 files,", "has the order '"):
        other.load_state_dict(one.state_dict())


def test_same_workers_resume_exactly(data: TarFiles) -> None:
    def read(stop: int) -> list[list[int]]:
        found = []
        for n in range(3):
            loader = data.loader(4, shuffle=True, window=20)
            one, again = shards(loader, 3)[n], shards(loader, 3)[n]
            found += [batch["number"].tolist() for batch in itertools.islice(one, stop)]
            again.load_state_dict(one.state_dict())
            found += [batch["number"].tolist() for batch in again]
        return found

    assert read(1) == read(4) == read(7)
