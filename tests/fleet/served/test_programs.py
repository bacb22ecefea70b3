# SPDX-License-Identifier: Apache-2.0
"""Programs with parameter servers equal the eager loop in every mode."""

import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Job, Member, Net, batches, geo, run
from tests.workers import run_job
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.data.observer import BatchShare
from fleetlight.errors import ConfigError, PlanError, StrategyError
from fleetlight.fleet.public.sharding import LoaderWeights
from fleetlight.fleet.served.durable.replayed_job import ReplayedSteps
from fleetlight.fleet.server.job import ServerJob
from fleetlight.fleet.training.programs import main_program
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.entries import ShowClickEntry
from fleetlight.ps.worker.client import Client
from fleetlight.roles import Kind, Role
from fleetlight.strategy import DistributedStrategy

pytestmark = pytest.mark.slow

#: a thread that writes a program watches module calls of the whole process
_writing = threading.Lock()
IDS, TARGETS = batches(6, 2, ids=30)


class Bags(nn.Module):
    """Bags of all kinds: with weights, padding and offsets, and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.total = SparseEmbeddingBag(4, "sum", padding_idx=2)
        self.mean = SparseEmbeddingBag(4, "mean", padding_idx=1)
        self.most = SparseEmbeddingBag(4, "max")
        self.moved = nn.EmbeddingBag(30, 4, sparse=True, padding_idx=3)
        self.linear = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        starts = torch.arange(0, ids.shape[0] * 3, 3)
        bags = [
            self.total(ids, per_sample_weights=self.each.expand(ids.shape)),
            self.mean(ids.reshape(-1), starts),
            self.most(ids * 7 - 100),
            self.moved(ids),
        ]
        out: Tensor = self.linear(torch.cat(bags, 1))
        return out


class Shared(nn.Module):
    """A table of several layers, a layer that is called twice, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.one = SparseEmbedding(4, table="t")
        self.two = SparseEmbedding(4, table="t", padding_idx=2)
        self.bag = SparseEmbeddingBag(4, "sum", table="t")
        self.plain = nn.Embedding(30, 4, sparse=True, padding_idx=1)
        self.tied = nn.Embedding(30, 4, sparse=True, padding_idx=4)
        self.tied.weight = self.plain.weight
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first, second, third = ids.unbind(1)
        rows = self.one(first) * self.one(second) + self.two(third) + self.bag(ids)
        rows = rows + self.plain(first) * self.tied(second) + self.plain(third)
        out: Tensor = self.linear(rows)
        return out


class Counted(nn.Module):
    """Ids with shows and clicks, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = SparseEmbedding(4, entry=ShowClickEntry("show", "click"))
        self.frozen = SparseEmbedding(4)
        self.frozen.weight.requires_grad_(False)
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.emb(ids, click=(ids % 2).float()) + self.frozen(ids)
        out: Tensor = self.linear(rows.sum(1))
        return out


class Dense(nn.Module):
    """A model without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 4)
        self.linear = nn.Linear(12, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.linear(self.drop(self.emb(ids).flatten(1)))
        return out


def capture(worker: Member) -> static.Program:
    inputs = {"ids": IDS[0, 0], "target": TARGETS[0, 0]}
    with _writing:
        return static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, inputs)


def by_program(worker: Member) -> Any:
    program, exe = capture(worker), static.Executor()
    evaluation = program.clone(for_test=True)
    losses = []
    for step in range(len(IDS)):
        torch.manual_seed(step)
        feed = {"ids": IDS[step, worker.index], "target": TARGETS[step, worker.index]}
        losses += exe.run(program, feed, ["loss"])
        # evaluations change nothing
        exe.run(evaluation, {"ids": torch.full((2, 3), 11)}, ["output"])
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    return final_state(worker, losses)


def eagerly(worker: Member) -> Any:
    losses = []
    for step in range(len(IDS)):
        torch.manual_seed(step)
        out = worker.model(IDS[step, worker.index])
        loss = nn.functional.mse_loss(out, TARGETS[step, worker.index])
        worker.descend(loss)
        losses.append(loss.detach())
    return final_state(worker, losses)


def final_state(worker: Member, losses: list[Tensor]) -> Any:
    worker.barrier()
    tables = len(worker.session.bound.plan.tables)
    return (
        torch.stack(losses),
        {n: p.detach().clone() for n, p in worker.model.named_parameters() if p.numel()},
        [worker.rows(np.arange(-100, 130) if n < 4 else range(30), n) for n in range(tables)],
        worker.context.step,
        [c.rows for c in worker.session.client.metrics()],
    )


def check(make: Any, strategy: dict[str, Any], workers: int = 1, servers: int = 2) -> None:
    def build() -> Any:
        return make()

    expected = run(build, eagerly, strategy, workers=workers, servers=servers)
    found = run(build, by_program, strategy, workers=workers, servers=servers)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def made(kind: Any, optimizer: Any = torch.optim.Adagrad, **options: Any) -> Any:
    def make() -> Any:
        model = kind()
        return model, [optimizer(model.parameters(), **{"lr": 0.1, **options})]

    return make


@pytest.mark.parametrize(
    "kind",
    [Bags, Net, Shared, Counted, Dense, lambda: Net(rows=30)],
    ids=["bags", "net", "shared", "counted", "dense", "moved"],
)
def test_program_equals_eager_training(kind: Any) -> None:
    check(made(kind), SYNC)


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        (Shared, torch.optim.Adam, {}),
        (Net, torch.optim.SGD, {"momentum": 0.9}),
        (Net, torch.optim.Adam, {}),
        (Dense, torch.optim.AdamW, {}),
    ],
)
def test_program_equals_eager_training_with_every_rule(
    kind: Any, optimizer: Any, options: Any
) -> None:
    check(made(kind, optimizer, **options), SYNC)


@pytest.mark.parametrize(
    "strategy",
    [
        geo(4),
        SYNC,
        geo(1),
        {"a_sync": False, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}},
    ],
    ids=["geo 4", "sync", "geo 1", "merge"],
)
def test_program_equals_eager_training_in_every_mode(strategy: dict[str, Any]) -> None:
    check(made(Shared, torch.optim.SGD, lr=0.05), strategy)


def test_program_with_two_workers_equals_eager_training() -> None:
    check(made(Shared, torch.optim.SGD, lr=0.05), SYNC, workers=2)


def test_async_applies_every_gradient() -> None:
    """One row, and a loss with constant gradient: the order does not matter."""

    def train(worker: Member) -> Any:
        program, executor = capture_sum(worker), static.Executor()
        for _ in range(5):
            executor.run(program, {"ids": torch.tensor([[1, 2, 2]])})
        worker.barrier()
        return worker.rows([1, 2, 3]), worker.model.linear.bias.detach().clone()  # type: ignore[union-attr]

    class Summed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.emb(ids).sum() + self.linear.bias.sum()
            return out

    def capture_sum(worker: Member) -> static.Program:
        with _writing:
            inputs = {"ids": torch.tensor([[1, 2, 2]])}
            return static.capture(worker.model, lambda out: out.sum(), worker.optimizer, inputs)

    start = run(made(Summed, torch.optim.SGD), lambda w: w.rows([1, 2, 3]), ASYNC)[0]
    rows, _ = run(made(Summed, torch.optim.SGD), train, ASYNC)[0]
    lost = np.array([[1.0], [2.0], [0.0]]) * 0.1 * 10
    np.testing.assert_allclose(start - rows, np.repeat(lost, 4, 1), atol=1e-5)


def test_batches_of_lower_weight_have_smaller_gradients() -> None:
    def train(worker: Member) -> Any:
        weights = LoaderWeights(worker.context)
        program = capture(worker)
        # first worker 1 has all samples, then each worker has half
        executor = static.Executor()
        for mine in (16 * worker.index, 8):
            weights.set(BatchShare(epoch=0, consumed=0, mine=mine, total=16))
            feed = {"ids": IDS[0, worker.index], "target": TARGETS[0, worker.index]}
            executor.run(program, feed)
        return [p.detach().clone() for p in worker.model.parameters() if p.numel()], worker.rows(
            range(30)
        )

    def plain(worker: Member) -> Any:
        program, executor = capture(worker), static.Executor()
        for number in (1, worker.index):
            executor.run(program, {"ids": IDS[0, number], "target": TARGETS[0, number]})
        return [p.detach().clone() for p in worker.model.parameters() if p.numel()], worker.rows(
            range(30)
        )

    found, expected = (run(made(Net), function, workers=2)[0] for function in (train, plain))
    torch.testing.assert_close(found, expected)


def test_program_keeps_gradients_of_an_eager_backward() -> None:
    def train(worker: Member) -> Any:
        program = capture(worker)
        worker.model(IDS[0, 0]).sum().backward()
        before = {n: p.grad for n, p in worker.model.named_parameters()}
        static.Executor().run(program, {"ids": IDS[0, 0], "target": TARGETS[0, 0]})
        for name, parameter in worker.model.named_parameters():
            assert parameter.grad is before[name]
        return [p.detach().clone() for p in worker.model.parameters() if p.numel()]

    def fresh(worker: Member) -> Any:
        program = capture(worker)
        static.Executor().run(program, {"ids": IDS[0, 0], "target": TARGETS[0, 0]})
        return [p.detach().clone() for p in worker.model.parameters() if p.numel()]

    found, expected = (run(made(Net), f, workers=1) for f in (train, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parameters_with_equal_gradients_do_not_share_memory() -> None:
    """Merged gradients add up in place."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.zeros(3)) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            return (ids % 3).float().mean(0) + self.one + self.two

    def train(worker: Member, eager: bool) -> Any:
        def loss(out: Tensor) -> Tensor:
            return (out * out).sum()

        with _writing:
            program = static.capture(worker.model, loss, worker.optimizer, {"ids": IDS[0, 0]})
        executor = static.Executor()
        for _ in range(4):
            if eager:
                worker.descend(loss(worker.model(IDS[0, 0])))
            else:
                executor.run(program, {"ids": IDS[0, 0]})
        return [p.detach().clone() for p in worker.model.parameters() if p.numel()]

    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    found, expected = (
        run(made(Twins, torch.optim.SGD), functools.partial(train, eager=e), merge, workers=1)
        for e in (False, True)
    )
    torch.testing.assert_close(found, expected)


def test_hooks_and_schedulers_see_every_step() -> None:
    def train(worker: Member) -> Any:
        seen = []
        worker.optimizer.register_step_post_hook(lambda *_: seen.append(1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        program, executor = capture(worker), static.Executor()
        for _ in range(3):
            executor.run(program, {"ids": IDS[0, 0], "target": TARGETS[0, 0]})
            scheduler.step()
        return len(seen), worker.optimizer.param_groups[0]["lr"]

    assert run(made(Net, lr=0.8), train, workers=1) == [(3, 0.1)]


def test_evaluations_insert_no_rows() -> None:
    def train(worker: Member) -> Any:
        program = capture(worker).clone(for_test=True)
        [out] = static.Executor().run(program, {"ids": IDS[0, 0]}, ["output"])
        with torch.no_grad():
            torch.testing.assert_close(out, worker.model(IDS[0, 0]))
        return [c.rows for c in worker.session.client.metrics()]

    assert run(made(Net), train, workers=1) == [[{"emb": 0}]]


def test_rows_are_prefetched() -> None:
    """Batches are fed unchanged, so the loader learns which tensors are ids."""

    def train(worker: Member) -> Any:
        program, announce = capture(worker), worker.context.prefetch_hints(None)
        data = [{"ids": IDS[n, 0].clone(), "target": TARGETS[n, 0]} for n in range(len(IDS))]
        executor = static.Executor()
        for number, batch in enumerate(data):
            announce.announce(data[number : number + 2])
            executor.run(program, batch)
        return worker.communicator.metrics()["rows_read_ahead"] > 0

    assert run(made(Net), train, workers=1) == [True]


class Program:
    """A process of a job with real connections, whose script writes its program by hand."""

    def __init__(self, strategy: dict[str, Any], folder: str) -> None:
        self.strategy, self.folder = strategy, folder

    def __call__(self) -> Any:
        """The script of servers and workers."""
        torch.manual_seed(0)
        ids = static.data("ids", [None, 3], torch.int64)
        target = static.data("target", [None, 1])
        model = Shared()
        loss = nn.functional.mse_loss(model(ids), target)
        evaluation = static.default_main_program().clone(for_test=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = fleet.DistributedStrategy(**self.strategy)
        fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            return None
        exe = static.Executor()
        for _ in range(2):
            exe.run(static.default_startup_program())
        fleet.init_worker()
        found = self.train(exe, loss, evaluation)
        if self.strategy is SYNC:
            self.compare(model, found[1])
        fleet.stop_worker()
        return found

    def train(self, exe: static.Executor, loss: Any, evaluation: static.Program) -> Any:
        """Losses, and the final evaluation, before and after a checkpoint."""
        main, mine = static.default_main_program(), fleet.worker_index()
        losses = []
        for ids, target in zip(IDS[:, mine], TARGETS[:, mine], strict=True):
            losses += exe.run(main, {"ids": ids, "target": target}, [loss])
        fleet.barrier_worker()
        last = {"ids": IDS[0, 0], "target": TARGETS[0, 0]}
        before = exe.run(evaluation, last, [loss])
        fleet.save_persistables(self.folder)
        exe.run(main, last)
        fleet.barrier_worker()
        changed = exe.run(evaluation, last, [loss])
        fleet.load_persistables(self.folder)
        after = exe.run(evaluation, last, [loss])
        assert before == after != changed
        return torch.stack(losses), before[0]

    def compare(self, model: nn.Module, expected: Tensor) -> None:
        """The model itself and its inference export compute the same."""
        fleet.save_inference_model(self.folder + "-inference", IDS[0, 0], model)
        fleet.barrier_worker()
        for one in (model, fleet.load_inference_model(self.folder + "-inference")):
            with torch.no_grad():
                out = one(IDS[0, 0])
            torch.testing.assert_close(nn.functional.mse_loss(out, TARGETS[0, 0]), expected)


@pytest.mark.parametrize(
    "strategy",
    [SYNC, ASYNC, {"a_sync_configs": {"dense": "allreduce"}}],
    ids=["sync", "async", "allreduce"],
)
def test_processes_train_with_programs(strategy: dict[str, Any], tmp_path: Any) -> None:
    script = Program(strategy, str(tmp_path / "checkpoint"))
    answers = run_job(script, script)
    assert [kind for kind, _ in answers] == ["value"] * 4, answers
    (_, first), (_, second) = answers[2:]
    torch.testing.assert_close(first[1], second[1])
    if strategy is ASYNC:
        return
    expected = run(made(Shared, torch.optim.SGD, lr=0.05), eagerly)
    for found, wanted in zip((first, second), expected, strict=True):
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_ids_out_of_range_are_named() -> None:
    def train(worker: Member) -> None:
        feed = {"ids": torch.full((8, 3), 30), "target": TARGETS[0, 0]}
        with pytest.raises(ConfigError, match=r"^emb: got id 30, expected 0 to 29"):
            static.Executor().run(capture(worker), feed)

    run(made(lambda: Net(rows=30)), train, workers=1)


def test_float16_needs_a_loss_scale() -> None:
    def train(worker: Member) -> None:
        with pytest.raises(StrategyError, match="use 'bfloat16'"):
            capture(worker)

    strategy = {"amp": True, "amp_configs": {"dtype": "float16"}}
    run(made(Net), train, strategy, workers=1)


def test_servers_write_no_gradients_and_run_nothing() -> None:
    job = Job(made(Net), SYNC, workers=1, servers=1)
    model, [optimizer] = job.built()
    context = ServerJob(
        role=Role(kind=Kind.SERVER, index=0, server_num=1, worker_num=1),
        group=job.member(0).context.group,
        strategy=DistributedStrategy(),
        process=SimpleNamespace(stop=lambda: None),  # type: ignore[arg-type]
    )
    context.models.append(context.manage_model(model))
    context.optimizers.append(context.manage_optimizer(optimizer))
    member = Member(0, context, model, [optimizer])
    program = capture(member)
    assert main_program() is program
    assert all(node.meta.get("part", "forward") == "forward" for node in program.form.graph.nodes)
    with pytest.raises(PlanError, match=r"run in a parameter server, .* fleet\.run_server\(\)"):
        static.Executor().run(program, {"ids": IDS[0, 0], "target": TARGETS[0, 0]})


# Several steps of a program in one call equal as many calls, with parameter servers.

MERGED = {"a_sync": False, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


def feeds(worker: Member, *, disjoint: bool = False) -> list[dict[str, Tensor]]:
    """With disjoint ids, the rows of a batch are equal whenever they are read."""
    shift = [1000 * step if disjoint else 0 for step in range(len(IDS))]
    return [
        {"ids": IDS[step, worker.index] + shift[step], "target": TARGETS[step, worker.index]}
        for step in range(len(IDS))
    ]


def train(worker: Member, steps: int | None, *, disjoint: bool, started: bool = False) -> Any:
    program, exe = capture(worker), static.Executor()
    given = feeds(worker, disjoint=disjoint)
    if steps is None:
        for feed in given:
            losses = exe.run(program, feed, ["loss"])
        return final_state(worker, losses)
    reader = static.bind([tuple(feed.values()) for feed in given], program=program)
    if started:
        reader.start()
    for at in range(0, len(given), steps):
        feed = None if started else given[at : at + steps]
        losses = exe.run(program, feed, ["loss"], steps=steps)
    return final_state(worker, losses)


@pytest.mark.parametrize(
    ("kind", "strategy", "workers"),
    [
        (Shared, MERGED, 2),
        (Net, SYNC, 2),
        (Shared, SYNC, 2),
        (Net, ASYNC, 1),
        (Net, geo(4), 1),
        (Shared, geo(4), 1),
        (Net, MERGED, 2),
    ],
)
def test_steps_equal_single_runs_bit_for_bit(
    kind: Any, strategy: dict[str, Any], workers: int
) -> None:
    # an async worker has the rows of later batches before its pushes of earlier ones
    disjoint = strategy is ASYNC
    make = made(kind, torch.optim.SGD, lr=0.05)
    [expected, one, other] = [
        run(make, functools.partial(train, disjoint=disjoint, **how), strategy, workers=workers)
        for how in ({"steps": None}, {"steps": 4}, {"steps": 4, "started": True})
    ]
    torch.testing.assert_close(one, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, expected, rtol=0, atol=0)


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pulls and pushes of all workers from now on."""
    calls: list[str] = []
    pull = Client.pull

    def counted(self: Client, *args: Any, **more: Any) -> Any:
        calls.append("pull")
        return pull(self, *args, **more)

    monkeypatch.setattr(Client, "pull", counted)
    return calls


def test_a_step_pulls_all_tables_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = requests(monkeypatch)

    def single(worker: Member) -> None:
        program, exe = capture(worker), static.Executor()
        calls.clear()
        for feed in feeds(worker):
            exe.run(program, feed)
        assert len(worker.session.bound.plan.tables) == 2
        assert len(calls) == len(IDS)

    run(made(Shared), single, workers=1)


@pytest.mark.parametrize(("strategy", "missed"), [(SYNC, 1), (ASYNC, 2)])
@pytest.mark.parametrize("started", [True, False])
def test_rows_come_with_pushes(
    strategy: Any, missed: int, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the first batch of the next call, where a started loader knows it."""
    calls = requests(monkeypatch)

    def several(worker: Member) -> int:
        program, exe = capture(worker), static.Executor()
        reader = static.bind([tuple(f.values()) for f in feeds(worker)], program=program)
        reader.start()
        calls.clear()
        for at in (0, 3):
            feed = None if started else feeds(worker)[at : at + 3]
            exe.run(program, feed, steps=3)
        return len(calls)

    assert run(made(Net), several, strategy, workers=1) == [missed * (1 if started else 2)]


def test_a_single_run_between_withdraws_what_was_announced() -> None:
    def mixed(worker: Member, steps: int | None) -> Any:
        program, exe = capture(worker), static.Executor()
        given = feeds(worker)
        reader = static.bind([tuple(f.values()) for f in given], program=program)
        reader.start()
        exe.run(program, steps=2) if steps else [exe.run(program) for _ in range(2)]
        exe.run(program, given[0])
        losses = (
            exe.run(program, fetch_list=["loss"], steps=2)
            if steps
            else [exe.run(program, fetch_list=["loss"]) for _ in range(2)][-1]
        )
        return final_state(worker, losses)

    found, expected = (run(made(Net), functools.partial(mixed, steps=steps)) for steps in (2, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_whatever_watches_steps_sees_every_one() -> None:
    def watched(worker: Member) -> Any:
        program, exe = capture(worker), static.Executor()
        [steps] = worker.context.steps
        exe.run(program, feeds(worker), steps=1)
        before = steps.needs_torch
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        with_scheduler = steps.needs_torch
        exe.run(program, feeds(worker), steps=2)
        scheduler.step()
        seen: list[int] = []
        hook = worker.optimizer.register_step_post_hook(lambda *_: seen.append(1))
        exe.run(program, feeds(worker), steps=3)
        hook.remove()
        own = worker.optimizer.step
        worker.optimizer.step = lambda *args: (seen.append(2), own(*args))[1]  # type: ignore
        exe.run(program, feeds(worker), steps=1)
        return before, with_scheduler, seen, worker.context.step

    assert run(made(Net), watched, workers=1) == [(False, False, [1, 1, 1, 2], 7)]


def test_a_learning_rate_set_between_calls_is_used() -> None:
    def halved(worker: Member, steps: int | None) -> Any:
        program, exe = capture(worker), static.Executor()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        for at in (0, 3):
            given = feeds(worker)[at : at + 3]
            if steps:
                losses = exe.run(program, given, ["loss"], steps=steps)
            for feed in () if steps else given:
                losses = exe.run(program, feed, ["loss"])
            scheduler.step()
        return final_state(worker, losses)

    found, expected = (
        run(made(Net, torch.optim.SGD), functools.partial(halved, steps=steps))
        for steps in (3, None)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_attached_scaler_and_a_journal_need_the_step_of_torch() -> None:
    def train(worker: Member) -> tuple[bool, bool, bool]:
        [steps] = worker.context.steps
        before = steps.needs_torch
        # as GradScaler.step sets it
        worker.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        return before, steps.needs_torch, ReplayedSteps.needs_torch.fget(steps)  # type: ignore[attr-defined]

    assert run(made(Net), train, workers=1) == [(False, True, True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "needed"), [(ASYNC, True), (SYNC, False), (geo(2), True)])
def test_dense_parameters_that_a_worker_steps_need_the_step_of_torch(
    strategy: Any, needed: bool
) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = SparseEmbedding(4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.emb(ids).sum((1, 2))[:, None]
            return out

    def train(worker: Member) -> bool:
        [steps] = worker.context.steps
        return steps.needs_torch

    assert run(made(Net), train, strategy, workers=1) == [needed]
    assert run(made(Rows), train, strategy, workers=1) == [False]


def test_a_job_may_save_after_each_step() -> None:
    class Stepped:
        made = 0

        def resume(self) -> None:
            pass

        def step_made(self) -> None:
            self.made += 1
            if self.made == 2:
                raise KeyboardInterrupt

    def train(worker: Member) -> tuple[int, int]:
        program, exe = capture(worker), static.Executor()
        worker.context.autosave = Stepped()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            exe.run(program, feeds(worker), steps=4)
        return worker.context.autosave.made, worker.context.step  # type: ignore[union-attr]

    assert run(made(Net), train, workers=1) == [(2, 2)]


class Calls(Program):
    """A process of a job with real connections that makes three steps a call."""

    def train(self, exe: static.Executor, loss: Any, evaluation: static.Program) -> Any:
        main, mine = static.default_main_program(), fleet.worker_index()
        given = list(zip(IDS[:, mine], TARGETS[:, mine], strict=True))
        static.bind(given, ["ids", "target"], main).start()
        for _ in range(2):
            [last] = exe.run(main, fetch_list=[loss], steps=3)
        fleet.barrier_worker()
        return last, exe.run(evaluation, {"ids": IDS[0, 0], "target": TARGETS[0, 0]}, [loss])[0]


def test_processes_make_several_steps_a_call(tmp_path: Any) -> None:
    script = Calls(SYNC, str(tmp_path / "checkpoint"))
    answers = run_job(script, script)
    assert [kind for kind, _ in answers] == ["value"] * 4, answers
    expected = run(made(Shared, torch.optim.SGD, lr=0.05), eagerly)
    for (_, found), wanted in zip(answers[2:], expected, strict=True):
        torch.testing.assert_close(found[0], wanted[0][-1], rtol=1e-5, atol=1e-6)
