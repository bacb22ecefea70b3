# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers of a script in a job with parameter servers, and hints for loaders."""

import functools
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.observing import Observing
from tests.served import ASYNC, SYNC, Job, Member, Net, geo, run, started
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fleetlight.collective.group import Group
from fleetlight.data.loader import ShardLoader
from fleetlight.data.observer import BatchShare, NoObserver
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.public import sharding
from fleetlight.fleet.public.sharding import JobObserver, LoaderWeights
from fleetlight.fleet.server.job import ServerJob
from fleetlight.fleet.training.model import reduction_of
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.roles import Kind, Role
from fleetlight.strategy import DistributedStrategy

ONE = torch.tensor([[1, 2, 3]])
MODES = pytest.mark.parametrize("mode", [SYNC, ASYNC, geo(3)], ids=["sync", "async", "geo"])


def build() -> Any:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


@MODES
def test_layers_with_a_common_weight_push_its_gradient_once(mode: dict[str, Any]) -> None:
    def tied() -> Any:
        model = nn.ModuleList(nn.Embedding(5, 2, sparse=True) for _ in range(2))
        model[1].weight = model[0].weight
        return model, [torch.optim.SGD(model.parameters(), lr=1.0)]

    def train(worker: Member) -> Any:
        before = worker.rows([3])
        one, other = worker.model.children()
        (one(ONE) + other(ONE)).sum().backward()
        worker.optimizer.step()
        worker.barrier()
        return (before - worker.rows([3])).tolist()

    assert run(tied, train, mode, workers=1) == [[pytest.approx([2.0, 2.0])]]


@MODES
def test_gradients_remain_after_the_step(mode: dict[str, Any]) -> None:
    def train(worker: Member) -> None:
        worker.model(ONE).sum().backward()
        before = {name: p.grad for name, p in worker.model.named_parameters()}
        assert all(gradient is not None for gradient in before.values())
        worker.optimizer.step()
        for name, parameter in worker.model.named_parameters():
            assert parameter.grad is before[name]

    run(build, train, mode, workers=1)


@pytest.mark.contract
@MODES
def test_minimize_after_backward_is_the_step(mode: dict[str, Any]) -> None:
    def train(worker: Member, *, before: bool) -> Any:
        for _ in range(3):
            loss = (worker.model(ONE) - 1).pow(2).sum()
            if before:
                loss.backward()
            worker.optimizer.minimize(loss)  # type: ignore[attr-defined]
            worker.optimizer.zero_grad()
            worker.barrier()
        return worker.model(ONE).tolist(), worker.context.step

    [one] = run(build, functools.partial(train, before=True), mode, workers=1)
    [other] = run(build, functools.partial(train, before=False), mode, workers=1)
    assert one == other
    assert one[1] == 3


@MODES
def test_hooks_and_schedulers_see_every_step(mode: dict[str, Any]) -> None:
    def train(worker: Member) -> Any:
        seen = []
        worker.optimizer.register_step_post_hook(lambda *_: seen.append(1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                worker.model(ONE).sum().backward()
                worker.optimizer.step()
                scheduler.step()
        return len(seen), worker.optimizer.param_groups[0]["lr"], worker.context.step

    assert run(build, train, mode, workers=1) == [(3, 0.0125, 3)]


@MODES
def test_closure_is_called_once_before_gradients_are_sent(mode: dict[str, Any]) -> None:
    def train(worker: Member) -> Any:
        losses = []

        def closure() -> Any:
            worker.optimizer.zero_grad()
            loss = worker.model(ONE).sum()
            loss.backward()
            losses.append(loss.detach())
            return loss

        assert worker.optimizer.step(closure) is losses[0] or len(losses) == 1
        worker.barrier()
        return len(losses), worker.rows([1])

    [(calls, rows)] = run(build, train, mode, workers=1)
    assert calls == 1
    assert not np.array_equal(rows[0], started(2, 4)[1])


def test_batches_of_lower_weight_have_smaller_gradients() -> None:
    def train(worker: Member) -> Any:
        [plan] = worker.context.models
        plan.set_batch_weight(0.5 + worker.index)
        worker.model(ONE).sum().backward()
        worker.optimizer.step()
        return worker.model.linear.bias.detach().clone()  # type: ignore[union-attr]

    def plain(worker: Member) -> Any:
        worker.model(ONE).sum().backward()
        worker.optimizer.step()
        return worker.model.linear.bias.detach().clone()  # type: ignore[union-attr]

    # (0.5 + 1.5) / 2
    assert torch.equal(run(build, train)[0], run(build, plain)[0])


def test_evaluation_pulls_no_new_values_and_inserts_no_rows() -> None:
    def train(worker: Member) -> Any:
        worker.model.eval()
        with torch.no_grad():
            out = worker.model(ONE)
        worker.model.train()
        return out, [c.rows for c in worker.session.client.metrics()]

    [(out, rows)] = run(build, train, ASYNC, workers=1)
    assert rows == [{"emb": 0}]
    torch.manual_seed(0)
    plain = Net()
    expected = plain.linear(started(4, 4)[1:].reshape(1, -1))
    torch.testing.assert_close(out, expected)


def test_model_works_after_the_job() -> None:
    def train(worker: Member) -> Any:
        [plan] = worker.context.models
        plan.close()
        return "forward" in vars(worker.model)

    assert run(build, train, workers=1) == [False]


def test_servers_do_not_train() -> None:
    model, [optimizer] = build()
    context = ServerJob(
        role=Role(kind=Kind.SERVER, index=0, worker_num=1, server_num=1),
        group=Group(deadline_s=1),
        strategy=DistributedStrategy(),
        process=SimpleNamespace(stop=lambda: None),  # type: ignore[arg-type]
    )
    context.models.append(context.manage_model(model))
    context.optimizers.append(context.manage_optimizer(optimizer))
    with pytest.raises(PlanError, match="the model was called in a parameter server"):
        model(ONE)
    with pytest.raises(PlanError, match=r"optimizer\.step was called in a parameter server"):
        optimizer.step()


@pytest.mark.contract
def test_two_optimizers_step_independently() -> None:
    def two() -> Any:
        model = Net()
        return model, [
            torch.optim.Adagrad(model.emb.parameters(), lr=0.1),
            torch.optim.SGD(model.linear.parameters(), lr=0.1),
        ]

    def train(worker: Member) -> Any:
        before = worker.model.linear.weight.detach().clone()  # type: ignore[operator,union-attr]
        worker.model(ONE).sum().backward()
        worker.optimizers[0].step()
        worker.barrier()
        rows = worker.rows([1])
        assert torch.equal(before, worker.model.linear.weight.detach())  # type: ignore[arg-type,operator,union-attr]
        worker.optimizers[1].step()
        worker.barrier()
        assert np.array_equal(rows, worker.rows([1]))
        assert not np.array_equal(rows[0], started(2, 4)[1])
        return torch.equal(before, worker.model.linear.weight.detach())  # type: ignore[arg-type,operator,union-attr]

    assert run(two, train, servers=2) == [False, False]


def test_parameter_without_gradient_does_not_change() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self) -> Any:
            return self.used.sum()

    def half() -> Any:
        model = Half()
        return model, [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)]

    def train(worker: Member) -> Any:
        worker.model().backward()
        worker.optimizer.step()
        worker.barrier()
        return [float(p.detach()) for p in worker.model.parameters()]

    for mode in (SYNC, ASYNC):
        for used, unused in Job(half, mode, workers=2, servers=1).run(train):
            assert used < 1.0 == unused


def scaled_steps(worker: Member, *, cleared: int, infinite: int) -> list[float]:
    """Scales of five clipped steps; one step is cleared, in one step worker 1 overflows."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0), []
    worker.context.scalers.append(scaler)
    for step in range(5):
        worker.optimizer.zero_grad()
        loss = worker.model(ONE).sum()
        if step == infinite and worker.index == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(worker.optimizer)
        worker.clip(1.0)
        if step == 1 and worker.index == cleared:
            worker.optimizer.zero_grad()
        scaler.step(worker.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_unattached_scaler_is_refused() -> None:
    def train(worker: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(worker.model(ONE).sum()).backward()
        with pytest.raises(PlanError, match=r"not attached.*call fleet\.attach\(scaler=scaler\)"):
            scaler.step(worker.optimizer)

    run(build, train, SYNC, workers=1)


@MODES
@pytest.mark.parametrize("cleared", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_step_with_cleared_gradients_is_no_overflow(mode: dict[str, Any], cleared: int) -> None:
    def train(worker: Member) -> Any:
        return scaled_steps(worker, cleared=cleared, infinite=-1), worker.context.step

    for index, (scales, steps) in enumerate(run(build, train, mode)):
        assert scales == [64.0] * 5
        assert steps == (4 if mode is SYNC or index == cleared else 5)


@pytest.mark.parametrize("on_nonfinite", ["refuse", "skip", "apply"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_overflow_after_clipping_reaches_all_workers(on_nonfinite: str) -> None:
    def train(worker: Member) -> Any:
        return scaled_steps(worker, cleared=0, infinite=3), worker.context.step

    mode = {**SYNC, "a_sync_configs": {"on_nonfinite": on_nonfinite}}
    assert run(build, train, mode) == [([64.0] * 3 + [32.0] * 2, 3)] * 2


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async"])
def test_gradient_scale_sum_has_no_effect_with_servers(mode: dict[str, Any]) -> None:
    """Worker 0 has 3 of 4 samples, worker 1 has 1; each counts by its samples."""

    def train(worker: Member) -> Any:
        weights = LoaderWeights(worker.context)
        weights.set(BatchShare(mine=3 - 2 * worker.index, total=4, epoch=0, consumed=0))
        (worker.model(ONE).sum() * (1 + worker.index)).backward()
        worker.barrier()  # both workers have read the unchanged values
        worker.optimizer.step()
        worker.barrier()
        assert reduction_of(worker.context).average
        return worker.rows([1, 2, 3]), worker.model.linear.bias.detach().clone()  # type: ignore[operator,union-attr]

    [mean, *_] = run(build, train, mode)
    [asked, *_] = run(build, train, {**mode, "gradient_scale": "sum"})
    np.testing.assert_allclose(asked[0], mean[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(asked[1], mean[1])


# The ids that a loader announces for prefetch: those of a function or learned ones.

IDS = torch.arange(24).view(8, 3)


def pairs(worker: Member, lookahead: Any = None, ids: Tensor = IDS) -> ShardLoader:
    """Batches of two records, {"x": (ids,), "y": target}."""
    records = [{"x": (row,), "y": torch.ones(1)} for row in ids]
    return ShardLoader(
        DataLoader(records, batch_size=2),  # type: ignore[arg-type]
        worker=worker.index,
        workers=worker.context.group.size,
        seed=0,
        tail="join",
        observer=Observing(announce=worker.context.prefetch_hints(lookahead)),
    )


def prefetched_rows(
    lookahead: Any = None, of: Callable[[Any], Tensor] = lambda batch: batch["x"][0], **job: Any
) -> float:
    """Rows prefetched in an epoch of four steps, each of which reads six."""

    def train(worker: Member) -> Any:
        for batch in pairs(worker, lookahead):
            worker.descend((worker.model(of(batch)) - batch["y"]).square().mean())
        return worker.communicator.metrics().get("rows_read_ahead", 0.0)

    return float(sum(run(build, train, **{"workers": 1, **job})))


def test_tensors_that_reach_a_table_unchanged_are_learned() -> None:
    # learned from the first batch; the second one is loaded before that batch trains
    assert prefetched_rows() == 12
    assert prefetched_rows(workers=2) == 0  # two steps each
    assert prefetched_rows(of=lambda batch: batch["x"][0].view(2, 3)) == 12


def test_changed_tensors_are_not_learned() -> None:
    assert prefetched_rows(of=lambda batch: batch["x"][0] + 1) == 0
    assert prefetched_rows(of=lambda batch: batch["x"][0][:, [0, 1, 2]]) == 0
    assert prefetched_rows(of=lambda batch: batch["x"][0].int()) == 0


def test_function_hints_from_the_first_batch_on() -> None:
    shifted = dict(of=lambda batch: batch["x"][0] + 1)  # noqa: C408
    assert prefetched_rows(lambda batch: {"emb": batch["x"][0] + 1}, **shifted) == 18
    assert prefetched_rows(lambda batch: {"emb": batch["x"][0]}, **shifted) == 15
    assert prefetched_rows(lambda batch: {}, **shifted) == 0


def test_geo_prefetches_no_batch() -> None:
    assert prefetched_rows(strategy=geo(2)) == 0

    def ahead(worker: Member) -> int:
        return worker.context.prefetch_hints(None).batches_ahead()

    assert run(build, ahead, geo(2), workers=1) == [0]
    assert run(build, ahead, SYNC, workers=1) == [1]


def test_invalid_functions_are_refused() -> None:
    with pytest.raises(PlanError, match="no table 'embb'; did you mean 'emb'"):
        prefetched_rows(lambda batch: {"embb": batch["x"][0]})
    with pytest.raises(ConfigError, match=r"lookahead of emb: got ids of type torch\.float32"):
        prefetched_rows(lambda batch: {"emb": batch["x"][0].float()})
    with pytest.raises(ConfigError, match="got lookahead=True, expected a function"):
        sharding._check_lookahead(True)  # type: ignore[arg-type]


def test_hints_with_padding_and_shared_tables() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (SparseEmbedding(2, table="t", padding_idx=0) for _ in range(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (self.a(a) + self.b(b)).sum((1, 2))

    def two() -> Any:
        model = Two()
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        loader = DataLoader([{"a": row, "b": row + 100} for row in IDS], batch_size=2)  # type: ignore[arg-type]
        sharded = ShardLoader(
            loader,
            worker=0,
            workers=1,
            seed=0,
            tail="join",
            observer=Observing(announce=worker.context.prefetch_hints(None)),
        )
        for batch in sharded:
            worker.descend(worker.model(batch["a"], batch["b"]).sum())
        return worker.communicator.metrics()["rows_read_ahead"], worker.rows(np.arange(1, 24))

    [(ahead, rows)] = run(two, train, workers=1, servers=2)
    assert ahead == 24
    assert rows.any()


def test_batch_changed_in_place_is_pulled_again() -> None:
    def train(worker: Member) -> None:
        for batch in pairs(worker):
            batch["x"][0].add_(50)
            worker.descend(worker.model(batch["x"][0]).sum())
        assert worker.communicator.metrics()["rows_read_ahead"] == 0
        assert [c.rows for c in worker.session.client.metrics()] == [{"emb": 24}]

    run(build, train, workers=1)


def test_loader_in_a_subprocess_announces_nothing() -> None:
    def train(worker: Member) -> Any:
        copy = pickle.loads(pickle.dumps(JobObserver(worker.context, None)))
        return type(copy), copy.batches_ahead()

    assert run(build, train, workers=1) == [(NoObserver, 0)]
