# SPDX-License-Identifier: Apache-2.0
"""`fleet.shrink`: which rows all servers remove, and what it returns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.fleet.served.durable.test_replayed_job import BATCH, Died, RestartableJob, sharded
from tests.served import ASYNC, SYNC, Built, Job, Member, geo
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.job import ShrunkTable
from fleetlight.fleet.public import rows as public_rows
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.ps import messages as m
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.entries import ShowClickEntry


class Two(nn.Module):
    """A table that counts shows and clicks, and a table that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.ads = SparseEmbedding(2, entry=ShowClickEntry())
        self.plain = SparseEmbedding(2)

    def forward(self, ids: Tensor, click: Tensor) -> Tensor:
        out: Tensor = self.ads(ids, click=click) + self.plain(ids)
        return out


def shrunk(
    member: Member,
    unseen_days: int = 0,
    score: float = 0.0,
    decay: float = 1.0,
    table: str | None = None,
) -> dict[str, ShrunkTable]:
    return member.context.shrink(unseen_days, score, decay, table)


def build() -> Built:
    model = Two()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def train(member: Member, ids: list[int], click: float = 0.0) -> None:
    member.optimizer.zero_grad()
    clicks = torch.full((len(ids),), click)
    member.model(torch.tensor(ids), clicks).sum().backward()
    member.optimizer.step()


def run(work: Any, strategy: dict[str, Any] = SYNC) -> list[Any]:
    return Job(build, strategy, workers=2, servers=2).run(work)


@pytest.mark.parametrize("strategy", [SYNC, ASYNC, geo(2)])
def test_shrink_removes_unseen_rows(strategy: dict[str, Any]) -> None:
    def work(member: Member) -> Any:
        train(member, list(range(20)))
        train(member, list(range(20)))
        answers = [shrunk(member, unseen_days=1)]
        train(member, list(range(5)))
        answers += [shrunk(member, unseen_days=1) for _ in range(2)]
        rows = [metrics.rows["plain"] for metrics in member.session.client.metrics()]
        return answers, sum(rows)

    kept = {"ads": ShrunkTable(0, 20)}, {"ads": ShrunkTable(15, 5)}, {"ads": ShrunkTable(5, 0)}
    for answers, plain in run(work, strategy):
        assert (tuple(answers), plain) == (kept, 20)


def test_shrink_removes_rows_of_low_score() -> None:
    def work(member: Member) -> Any:
        train(member, list(range(10)))
        train(member, list(range(4)), click=1.0)
        # 2 workers: score 0.2 for rows shown, 0.1 * (4 - 2) + 2 for rows clicked; decay halves it
        first = shrunk(member, score=0.09, decay=0.5)
        return first, shrunk(member, score=0.5, decay=1.0, table="ads")

    assert run(work) == [({"ads": ShrunkTable(0, 10)}, {"ads": ShrunkTable(6, 4)})] * 2


def test_each_call_of_a_single_worker_is_a_day() -> None:
    def work(member: Member) -> Any:
        train(member, list(range(10)))
        return [shrunk(member, score=0.04, decay=0.5) for _ in range(2)]

    days = [{"ads": ShrunkTable(0, 10)}, {"ads": ShrunkTable(10, 0)}]
    assert Job(build, SYNC, workers=1, servers=2).run(work) == [days]


def test_worker_that_dies_during_shrink_ends_the_day_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(member: Member) -> Any:
        loader, results = sharded(), []
        for _ in range(loader.epoch, 1):
            for (ids,) in loader:
                train(member, ids.flatten().tolist())
                if loader.consumed == 2 * BATCH:
                    results.append(shrunk(member, score=0.04, decay=0.5))
        return results

    def dies(files: TableFiles, message: m.Message, nbytes: int = 0) -> Any:
        tell(files, message, nbytes)
        raise Died

    tell, job = TableFiles.ask_all, RestartableJob(tmp_path, build=build)
    with monkeypatch.context() as patch:
        patch.setattr(TableFiles, "ask_all", dies)
        assert isinstance(job.run_incarnation(script), Died)
    # another day would remove all rows
    assert job.run_incarnation(script) == [{"ads": ShrunkTable(0, 2 * BATCH)}]


def test_tables_that_cannot_shrink_are_refused() -> None:
    def work(member: Member) -> Any:
        texts = []
        for kind, table in ((PlanError, "plain"), (ConfigError, "adds")):
            texts.append(error_text(kind, shrunk, member, table=table))
        return texts

    for plain, unknown in run(work):
        assert "table 'plain' does not have an entry" in plain
        assert "SparseEmbedding(dim, entry=fleet.ShowClickEntry())" in plain
        assert unknown == "fleet.shrink: there is no table 'adds'; did you mean 'ads'?"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unseen_days": -1}, "unseen_days=-1"),
        ({"unseen_days": 1.5}, "unseen_days=1.5"),
        ({"score": float("nan")}, "score=nan"),
        ({"decay": 0}, "decay=0, expected 0 < decay <= 1"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"unseen_days": 0, "score": 0.0, "decay": 1.0}
    with pytest.raises(ConfigError, match=message):
        public_rows._check(**{**usual, **settings})
