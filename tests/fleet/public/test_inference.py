# SPDX-License-Identifier: Apache-2.0
"""Inference models of jobs with parameter servers compute the same without servers."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.served import ASYNC, SYNC, Built, Job, Member, batches, loss_of
from tests.workers import run_job, run_processes
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import checkpoint, static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.public.inference import with_plain_layers
from fleetlight.fleet.training.model import as_plain_module
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag

pytestmark = pytest.mark.slow

IDS, TARGETS = batches(4, 2)


class Every(nn.Module):
    """Each kind of layer with a table, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = SparseEmbedding(2, padding_idx=0)
        self.again = nn.ModuleDict({"same": self.one})
        self.shared = SparseEmbedding(2, table="one")
        self.bag = SparseEmbeddingBag(3, "mean", initializer=("normal", 0.0, 0.1))
        self.moved = nn.Embedding(30, 2, sparse=True, padding_idx=1)
        self.moved_bag = nn.EmbeddingBag(30, 2, mode="sum", sparse=True)
        self.linear = nn.Linear(3 * 4 * 2 + 3 + 2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        flat = [self.one(ids), self.again["same"](ids + 1), self.shared(ids), self.moved(ids % 30)]
        rows = torch.cat([part.flatten(1) for part in flat], 1)
        out: Tensor = self.linear(torch.cat([rows, self.bag(ids), self.moved_bag(ids % 30)], 1))
        return out


def build() -> Built:
    model = Every()
    # layers of one table are in one param group
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.05)]


def train(member: Member) -> None:
    for step in range(4):
        member.optimizer.zero_grad()
        ids, targets = IDS[step, member.index], TARGETS[step, member.index]
        loss_of(member.model, ids, targets).backward()
        member.optimizer.step()
    member.barrier()


def export(member: Member, path: Path, rows: Any = "all", module: Any = None) -> None:
    """Export as `save_inference_model` does."""
    model = module or member.model
    with with_plain_layers(member.context, model, rows) as frozen, as_plain_module(frozen):
        checkpoint.save_inference(path, frozen, (IDS[0, 0],))


# known and unknown ids, in a batch of another size
QUESTIONS = torch.cat([IDS[1, 1], IDS[2, 0] + 10**12, -IDS[3, 0] - 10**9])


@pytest.mark.parametrize("strategy", [ASYNC, SYNC])
def test_an_exported_model_computes_the_same_without_servers(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    def work(member: Member) -> Any:
        train(member)
        if member.index == 0:
            export(member, tmp_path)
        with torch.no_grad():
            return member.model.eval()(QUESTIONS)

    expected, _ = Job(build, strategy, workers=2, servers=2).run(work)
    model = checkpoint.load_inference(tmp_path)
    torch.testing.assert_close(model(QUESTIONS), expected, rtol=1e-5, atol=1e-6)
    assert model.manifest.static_because is None


def test_training_continues_after_an_export(tmp_path: Path) -> None:
    def work(member: Member) -> Any:
        train(member)
        before = list(member.model.named_modules())
        export(member, tmp_path)
        same = [a is b for (_, a), (_, b) in zip(before, member.model.named_modules(), strict=True)]
        train(member)
        return all(same), member.model.training, [w.shape[0] for w in table_weights(member.model)]

    assert Job(build, SYNC, workers=1, servers=2).run(work) == [(True, True, [0] * 5)]


def table_weights(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if not name.startswith("linear")]


@pytest.mark.parametrize("servers", [2, 1])
def test_export_of_a_table_without_rows(tmp_path: Path, servers: int) -> None:
    """Before training every id reads its first value."""

    def work(member: Member) -> Any:
        export(member, tmp_path)
        with torch.no_grad():
            return member.model.eval()(QUESTIONS)

    [expected] = Job(build, SYNC, workers=1, servers=servers).run(work)
    model = checkpoint.load_inference(tmp_path)
    torch.testing.assert_close(model(QUESTIONS), expected, rtol=1e-5, atol=1e-6)


def test_export_of_ids_without_rows(tmp_path: Path) -> None:
    def work(member: Member) -> Any:
        train(member)
        export(member, tmp_path, rows={"bag": torch.tensor([10**15])}, module=member.model.bag)

    Job(build, SYNC, workers=1, servers=1).run(work)
    held = checkpoint.load_inference(tmp_path)._run.state_dict()
    assert {name: tuple(t.shape) for name, t in held.items()} == {
        "rows.ids": (0,),
        "rows.rows": (0, 3),
    }


def test_export_of_some_ids_only(tmp_path: Path) -> None:
    def work(member: Member) -> Any:
        train(member)
        export(member, tmp_path, rows={"one": torch.tensor([1, 2, 10**15])}, module=one(member))
        with torch.no_grad():
            return member.model.one(torch.tensor([1, 2]))

    def one(member: Member) -> nn.Module:
        """A layer alone can be the model."""
        layer: Any = member.model.one
        return layer

    [expected] = Job(build, SYNC, workers=1, servers=2).run(work)
    model = checkpoint.load_inference(tmp_path)
    held = {name: tuple(t.shape) for name, t in model._run.state_dict().items()}
    assert held == {"rows.ids": (2,), "rows.rows": (2, 2)}
    ids = torch.tensor([[1, 2, 0]] * 8)
    assert torch.equal(model(ids)[0], torch.cat([expected, torch.zeros(1, 2)]))


def alone(path: str) -> Any:
    """A script of one process that uses the public functions."""
    fleet.init()
    torch.manual_seed(0)
    layer = fleet.nn.SparseEmbedding(3, entry=fleet.ShowClickEntry())
    model = fleet.distributed_model(nn.Sequential(layer, nn.Linear(3, 1)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    fleet.save_inference_model(path, torch.arange(5))
    with torch.no_grad():
        expected = model(QUESTIONS.reshape(-1))
    shrunk = fleet.shrink(score=0.05)
    fleet.stop_worker()
    # the job and its server have ended
    same = torch.equal(fleet.load_inference_model(path)(QUESTIONS.reshape(-1)), expected)
    return same, {name: tuple(counts) for name, counts in shrunk.items()}


@pytest.mark.multiprocess
def test_export_by_a_script_of_one_process(tmp_path: Path) -> None:
    [answer] = run_processes(alone, [(str(tmp_path),)])
    assert answer == (True, {"0": (5, 0)})


def test_export_of_unknown_tables_is_refused() -> None:
    def work(member: Member) -> Any:
        texts = []
        for rows in ("some", {"on": torch.tensor([1])}):
            texts.append(error_text(ConfigError, export, member, Path("never"), rows=rows))
        return texts

    [(word, name)] = Job(build, SYNC, workers=1, servers=1).run(work)
    assert 'got rows=\'some\', expected "all", "reader" or the ids' in word
    assert "rows has 'on', which is no table; did you mean 'one'?" in name


def test_export_before_training_is_refused() -> None:
    member = Job(build, SYNC, workers=2, servers=1).member(0)
    with pytest.raises(PlanError, match=r"call fleet\.init_worker\(\) on every worker first"):
        export(member, Path("never"))
    member.context.group.leave()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [(object(), "dir", ["x"], ["y"]), ("dir", ["x"], ["y"], 1)])
def test_arguments_of_paddle_fleet_name_the_new_form(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"write fleet\.save_inference_model\(dirname, feeds, f"):
        fleet.save_inference_model(*given)


class Written(nn.Module):
    """As in models of Fleet, a method writes the program and the model itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.every = Every()
        self.weighed = SparseEmbeddingBag(2, "sum", padding_idx=3)
        self.counted = SparseEmbedding(2, entry=fleet.ShowClickEntry("show", "click"))
        self.dropout = nn.Dropout(0.3)

    def net(self) -> tuple[Tensor, Tensor]:
        ids, y = static.data("ids", [None, 3], torch.int64), static.data("y", [None, 1])
        each = torch.sigmoid(ids.float())
        rows = self.weighed(ids, per_sample_weights=each).sum(1, keepdim=True)
        rows = rows + self.counted(ids, click=y.expand(-1, 3)).sum((1, 2)).unsqueeze(1)
        out = self.every(ids) + self.dropout(rows)
        out.name = "score"  # type: ignore[attr-defined]
        return out, nn.functional.mse_loss(out, y)


def write_and_export(strategy: dict[str, Any], folder: str) -> Any:
    """A program of Fleet's shape trains, and is exported by its feeds and targets."""
    model = Written()
    out, loss = model.net()
    main = static.default_main_program()
    test = main.clone(for_test=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**strategy))
    optimizer.minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    executor = static.Executor()
    executor.run(static.default_startup_program())
    for step in range(3):
        executor.run(main, feed={"ids": IDS[step, fleet.worker_index()], "y": TARGETS[step, 0]})
    fleet.barrier_worker()
    fleet.save_inference_model(folder, ["ids"], [out], program=fleet.main_program)
    fleet.save_inference_model(folder + "-of-test", ["ids"], ["score"], program=test)
    # the clicks of ids are fed, though an evaluation counts none
    questions = {"ids": QUESTIONS % 30, "y": torch.zeros(len(QUESTIONS), 1)}
    found = executor.run(test, feed=questions, fetch_list=[out])[0]
    fleet.stop_worker()
    return found.tolist()


@pytest.mark.gate
@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (SYNC, (2, 2)),
        pytest.param(SYNC, (0, 1), marks=pytest.mark.long),
        pytest.param(ASYNC, (0, 1), marks=pytest.mark.long),
        pytest.param(ASYNC, (2, 2), marks=pytest.mark.long),
    ],
)
def test_program_written_by_hand_is_exported_with_its_tables(
    tmp_path: Path, strategy: dict[str, Any], size: tuple[int, int]
) -> None:
    work = functools.partial(write_and_export, strategy, str(tmp_path / "out"))
    answers = run_job(work, work, servers=size[0], workers=size[1])
    assert {kind for kind, _ in answers} == {"value"}, answers
    expected = torch.tensor(answers[size[0]][1])
    for folder in ("out", "out-of-test"):
        model = fleet.load_inference_model(tmp_path / folder)
        torch.testing.assert_close(model(QUESTIONS % 30), expected)
        assert model(QUESTIONS[:1] % 30).shape == (1, 1)


@pytest.mark.gate
@pytest.mark.long
def test_export_is_a_file_of_torch(tmp_path: Path) -> None:
    work = functools.partial(write_and_export, SYNC, str(tmp_path / "out"))
    [(_, expected)] = run_job(work, work, servers=0, workers=1)
    code = (
        "import sys, torch;"
        "model = torch.export.load(sys.argv[1]).module();"
        "print(model(torch.tensor(eval(sys.argv[2]))).tolist());"
        "assert not [name for name in sys.modules if name.startswith('fleetlight')]"
    )
    [file] = (tmp_path / "out").rglob("*.pt2")
    ids = str((QUESTIONS % 30).tolist())
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), ids], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(eval(done.stdout)), torch.tensor(expected))


def test_program_without_a_job_exports_the_rows_of_its_layers(tmp_path: Path) -> None:
    model = nn.EmbeddingBag(9, 2, mode="sum", sparse=True)
    with static.program_guard(static.Program()):
        out = model(static.data("ids", [None, 3], torch.int64)) * 2
        program = static.default_main_program()
    fleet.save_inference_model(tmp_path, ["ids"], [out], program=program)
    ids = torch.tensor([[1, 2, 8], [0, 0, 0]])
    torch.testing.assert_close(fleet.load_inference_model(tmp_path)(ids), model(ids) * 2)
    with static.program_guard(static.Program()):
        out = SparseEmbedding(2)(static.data("ids", [None], torch.int64))
        program = static.default_main_program()
    with pytest.raises(PlanError, match="the rows of a SparseEmbedding are in a table of a job"):
        fleet.save_inference_model(tmp_path, ["ids"], [out], program=program)
