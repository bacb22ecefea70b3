# SPDX-License-Identifier: Apache-2.0
"""Lines of files, streamed and sharded."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from tests.data.simulated import Workers, counting, in_processes, single
from torch.utils.data import DataLoader

from fleetlight.data import FileStream
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
