# SPDX-License-Identifier: Apache-2.0
"""Lines of files, streamed and sharded."""

import gzip
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.data.simulated import Workers, counting, in_processes, single
from torch import Tensor
from torch.utils.data import DataLoader

from fleetlight.data import FileStream
from fleetlight.data.readers.files import contents, find, first_file, refuse_absent
from fleetlight.data.readers.lines import existing, lines_of, located, table_of
from fleetlight.errors import CheckpointError, ConfigError, DataError

COUNTS = (2_500, 1, 1_699)


def numbers(lines: list[bytes]) -> list[int]:
    return [int(line) for line in lines]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Numbers 0, 1, 2 ... over three files with headers, one of them compressed."""
    start, paths = 0, []
    for name, count in zip(("a.txt", "b.gz", "c.txt"), COUNTS, strict=True):
        raw = ("number\n" + "".join(f"{i}\n" for i in range(start, start + count))).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        paths.append(str(tmp_path / name))
        start += count
    return paths


def stream(files: list[str], **settings: Any) -> FileStream[list[int]]:
    return FileStream(files, numbers, header=1, **settings)


def test_lines_are_read_in_order(files: list[str]) -> None:
    batches = list(stream(files).loader(100))
    assert [number for batch in batches for number in batch] == list(range(sum(COUNTS)))
    assert next(iter(stream(files))) == (b"0\n", files[0], 2)


@pytest.mark.slow
@in_processes
@pytest.mark.parametrize("shuffle", [300, 0])
def test_workers_lose_and_repeat_nothing(
    files: list[str], shuffle: int, processes: dict[str, Any]
) -> None:
    workers = Workers(lambda: stream(files, shuffle=shuffle).loader(64, **processes), 3)
    for _ in range(2):
        assert sorted(counting(workers.epoch())) == list(range(sum(COUNTS)))


@pytest.mark.slow
@in_processes
def test_resuming_within_an_epoch_gives_the_rest(
    files: list[str], processes: dict[str, Any]
) -> None:
    def make() -> DataLoader[Any]:
        return stream(files, shuffle=500).loader(100, **processes)

    original = Workers(make, 2)
    original.epoch()
    whole = original.epoch()
    before = Workers(make, 2)
    before.epoch()
    before.epoch(9)
    # another number of workers resumes at the same position
    after = Workers(make, 1).load(before.loaders[0].state_dict())
    rest = [record for step in whole[9:] for part in step for record in part.records]
    if not processes:
        assert counting(after.epoch()) == rest
    else:
        assert sorted(counting(after.epoch())) == sorted(rest)


def test_only_lines_of_this_worker_are_parsed(files: list[str]) -> None:
    parsed: list[int] = []

    def parse(lines: list[bytes]) -> list[int]:
        parsed.extend(numbers(lines))
        return numbers(lines)

    part = single(FileStream(files, parse, header=1).loader(100), worker=1, workers=2)
    seen = [number for batch in part for number in batch[: part.counted]]
    assert parsed == seen
    assert len(seen) == sum(COUNTS) // 2


def test_each_epoch_has_its_own_order(files: list[str]) -> None:
    orders = []
    for epoch, seed in [(0, 0), (0, 0), (1, 0), (0, 1)]:
        data = stream(files, shuffle=200, seed=seed)
        data.set_epoch(epoch)
        orders.append([number for batch in data.loader(64) for number in batch])
    first, again, other, seeded = orders
    assert first == again
    assert len({tuple(order) for order in (first, other, seeded)}) == 3
    assert sorted(first) == list(range(sum(COUNTS)))
    # lines are shuffled within windows, so those of one file stay close
    assert max(first[:200]) - min(first[:200]) < sum(COUNTS) / 2


def test_persistent_loading_processes_receive_the_epoch(files: list[str]) -> None:
    data = stream(files, shuffle=200)
    loader = data.loader(64, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        epochs.append(list(loader))
    assert epochs[0] == epochs[2] != epochs[1]


def test_a_bad_line_is_named(files: list[str]) -> None:
    path = Path(files[2])
    path.write_text(path.read_text().replace("3000\n", "three\n"))
    with pytest.raises(DataError, match=rf"{path}, line 501: ValueError: .*three"):
        list(stream(files).loader(1000))


def test_patterns_are_expanded_and_absent_files_named(files: list[str], tmp_path: Path) -> None:
    assert FileStream(f"{tmp_path}/*", numbers).files == files
    assert FileStream(Path(files[0]), numbers).files == files[:1]
    with pytest.raises(DataError, match=r"no such file .*nothing is downloaded"):
        FileStream(f"{tmp_path}/nothing*", numbers)
    with pytest.raises(DataError, match=r"gone: not a file"):
        FileStream([files[0], "gone"], numbers)
    with pytest.raises(ConfigError, match="shuffle=-1"):
        FileStream(files, numbers, shuffle=-1)


def test_position_in_another_order_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{n}\n" for n in range(20)))
    one, other = (
        single(FileStream(tmp_path / "a", len, shuffle=window).loader(4)) for window in (0, 10)
    )
    next(iter(one))
    with pytest.raises(CheckpointError, match=r"'in sequence', but .* windows of 10 lines with se"):
        other.load_state_dict(one.state_dict())


# -- lines with their file and line number --------------------------------------------------------


def test_blank_lines_and_headers_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"top\n\na\n  \r\nb")
    assert list(lines_of(str(path), header=1)) == [(b"a\n", str(path), 3), (b"b", str(path), 5)]


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % i for i in range(10_000)))[:-2000])
    with pytest.raises(DataError, match=rf"{path}, after line \d+: cannot be read"):
        list(lines_of(str(path)))


def test_errors_of_any_kind_name_their_line() -> None:
    lines = [(b"1\n", "f", 7), (b"0\n", "f", 8)]
    with pytest.raises(DataError, match=r"f, line 8: ZeroDivisionError") as caught:
        located(lambda texts: [1 // int(text) for text in texts], lines)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_without_a_faulty_line_is_unchanged() -> None:
    def parse(texts: list[bytes]) -> None:
        if len(texts) > 1:
            raise ValueError("too many")

    with pytest.raises(ValueError, match=r"^too many$"):
        located(parse, [(b"1\n", "f", 7), (b"0\n", "f", 8)])


class Numbers(NamedTuple):
    """The batch of these tests."""

    value: Tensor


def parse(lines: list[bytes]) -> Numbers:
    return Numbers(torch.tensor([*map(int, lines)]))


def test_chunks_of_long_files_are_concatenated(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("head\n" + "".join(f"{i}\n" for i in range(40_000)))
    whole = table_of(tmp_path / "x", parse, lambda line: line == b"head\n")
    assert torch.equal(whole.value, torch.arange(40_000))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("head\n")
    with pytest.raises(DataError, match=r"x: got no records"):
        table_of(tmp_path / "x", parse, lambda line: line == b"head\n")


def test_existing_expands_patterns(tmp_path: Path) -> None:
    for name in ("b[1]", "a"):
        (tmp_path / name).touch()
    assert existing(f"{tmp_path}/*") == [str(tmp_path / "a"), str(tmp_path / "b[1]")]
    assert existing(tmp_path / "b[1]") == [str(tmp_path / "b[1]")]
    with pytest.raises(DataError, match="an empty list"):
        existing([])


# -- finding and reading files --------------------------------------------------------------------


def test_the_first_folder_wins_then_the_first_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one / "b", two / "a", two / "b"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert first_file([one, two], ["a", "b"]) == one / "b"
    assert first_file([two], ["a", "b"]) == two / "a"
    assert first_file([one, two], ["c"]) is None


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"inside"))
    assert contents(path) == b"inside"
    path.write_bytes(b"inside")
    assert contents(path) == b"inside"


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(bytes(range(256)) * 10)
    path.write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"x\.gz: cannot be read .*end-of-stream"):
        contents(path)
    damaged = bytearray(packed)
    damaged[-5] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="CRC"):
        contents(path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone: cannot be read"):
        contents(tmp_path / "gone")


def test_find_tries_names_and_folders_in_order(tmp_path: Path) -> None:
    assert find(tmp_path, ["a", "b"]) is None
    for name in ("b", "a.gz", "sub/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find(tmp_path, ["a", "b"]) == tmp_path / "a.gz"
    assert find(tmp_path / "b", ["a"]) == tmp_path / "b"
    assert find(tmp_path, ["c"], [".", "sub"]) is None
    assert find(tmp_path, ["a"], ["sub", "."]) == tmp_path / "sub/a"


def test_absent_files_are_refused_or_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"X: .*no such folder.* a or b, plain.*stand_in=True"):
        refuse_absent("X", tmp_path / "gone", "a or b, plain or .gz", allowed=False)
    with caplog.at_level(logging.WARNING, "fleetlight"):
        refuse_absent("X", tmp_path, "a", allowed=True)
    assert "GENERATED" in caplog.text
