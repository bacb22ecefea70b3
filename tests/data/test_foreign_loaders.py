# SPDX-License-Identifier: Apache-2.0
"""torchdata's StatefulDataLoader, and the data sets of HuggingFace."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.columns.making import numbered
from tests.data.simulated import Numbers, Workers, counting, plain
from tests.data.sources.sharded_streams import counted, read, split
from torch.utils.data import DataLoader

from fleetlight.data import ShardLoader
from fleetlight.errors import ConfigError

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is absent")
datasets = pytest.importorskip("datasets", reason="HuggingFace's datasets is absent")

# torchdata asks for it
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

_SIZES = [70, 30, 55, 90]


def _numbers(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["number"] for row in rows])


@pytest.fixture
def stream(tmp_path: Path) -> Callable[[], Any]:
    """Makes a stream of four files."""
    numbered(tmp_path, _SIZES)

    def make() -> Any:
        return datasets.load_dataset(
            "parquet",
            data_files=f"{tmp_path}/*.parquet",
            split="train",
            streaming=True,
            cache_dir=tmp_path / "cache",
        )

    return make


def test_stateful_loader_has_the_order_of_a_plain_one() -> None:
    def stateful() -> Any:
        return torchdata.StatefulDataLoader(Numbers(30), 4, shuffle=True)

    ours, usual = Workers(stateful, 3), Workers(lambda: plain(4, shuffle=True), 3)
    assert ours.epoch() == usual.epoch()
    first = ours.epoch(1)
    others = Workers(stateful, 2).load(ours.loaders[0].state_dict())
    assert sorted(counting(first) + counting(others.epoch())) == list(range(30))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_map_style_dataset_is_dealt_out(workers: int) -> None:
    rows = datasets.Dataset.from_dict({"number": list(range(23))})
    make = Workers(lambda: DataLoader(rows, 4, shuffle=True, collate_fn=_numbers), workers)
    first, others = make.epoch(), make.epoch()
    assert sorted(counting(first)) == sorted(counting(others)) == list(range(23))
    assert first != others


_KINDS = pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
#: the numbers that are left of the stream, since it computes them and leaves some out
_LEFT = [2 * n for n in range(sum(_SIZES)) if 2 * n % 3]


def _loader(kind: str, stream: Any, processes: int = 0) -> Any:
    make = DataLoader if kind == "DataLoader" else torchdata.StatefulDataLoader
    kept = stream.map(lambda row: {"number": row["number"] * 2}).filter(
        lambda row: row["number"] % 3
    )
    return make(kept, 8, num_workers=processes, collate_fn=_numbers)


@_KINDS
@pytest.mark.parametrize("processes", [0, 2])
def test_blocks_of_a_stream_resume_exactly(
    stream: Callable[[], Any], kind: str, processes: int
) -> None:
    def workers(number: int) -> Workers:
        return Workers(lambda: _loader(kind, stream(), processes), number)

    first = workers(2)
    before = first.epoch(5)
    others = workers(3).load(first.loaders[0].state_dict())
    assert sorted(counting(before) + counting(others.epoch())) == _LEFT


@_KINDS
def test_shards_of_a_stream_resume_exactly(stream: Callable[[], Any], kind: str) -> None:
    def workers() -> list[ShardLoader[Any]]:
        return split(lambda: _loader(kind, stream()), 2)

    first = workers()
    before = read(first, 5)
    others = workers()
    for one, other in zip(first, others, strict=True):
        other.load_state_dict(one.state_dict())
    assert counted(before) + counted(read(others)) == Counter(_LEFT)


def test_stream_that_is_split_already_is_refused(stream: Callable[[], Any]) -> None:
    from datasets.distributed import split_dataset_by_node

    loader = DataLoader(split_dataset_by_node(stream(), rank=0, world_size=2), 8)
    with pytest.raises(ConfigError, match="split by split_dataset_by_node already"):
        Workers(lambda: loader, 2)
