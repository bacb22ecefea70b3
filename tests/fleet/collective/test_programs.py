# SPDX-License-Identifier: Apache-2.0
"""Static programs in a job train as the eager loop of the same strategy does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import WorkerFailedError, run_workers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.job import current
from fleetlight.static.graph.form import Form

pytestmark = pytest.mark.multiprocess


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 6, generator=generator).double()
    return TensorDataset(x, torch.randint(0, 3, (23,), generator=generator))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3)
    return nn.Sequential(*layers).double()


def example() -> dict[str, Tensor]:
    return {"x": torch.zeros(4, 6).double(), "y": torch.zeros(4, dtype=torch.int64)}


def prepared(
    strategy: Any, seed: int = 0, size: int = 4
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    return model, optimizer, fleet.shard(DataLoader(records(), size, shuffle=True))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def eager(settings: dict[str, Any], seed: int = 0, size: int = 4) -> Any:
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**settings), seed, size)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(2):
        for x, y in loader:
            optimizer.minimize(F.cross_entropy(model(x), y))  # type: ignore[attr-defined]
            optimizer.zero_grad()
        schedule.step()
    return state_of(model)


def captured(settings: dict[str, Any], seed: int = 0, size: int = 4) -> Any:
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**settings), seed, size)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    executor = static.Executor()
    for _ in range(2):
        for x, y in loader:
            executor.run(program, {"x": x, "y": y})
        schedule.step()
    return state_of(model)


def written(settings: dict[str, Any], seed: int = 0) -> Any:
    main, startup = static.Program(), static.Program()
    model = network(seed)
    with static.program_guard(main, startup):
        x, y = static.data("x", [None, 6], "float64"), static.data("y", [None], "int64")
        cost = F.cross_entropy(model(x), y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        strategy = fleet.DistributedStrategy(**settings)
        fleet.distributed_optimizer(optimizer, strategy).minimize(cost)
    assert fleet.main_program is main
    loader = fleet.shard(DataLoader(records(), 4, shuffle=True))
    executor = static.Executor()
    for _ in range(2):
        executor.run(startup)
        for batch in static.bind(loader, [x, y]):
            executor.run(main, batch, [cost])
        schedule.step()
    return state_of(model)


SETTINGS: list[dict[str, Any]] = [
    {"gradient_scale": "sum"},
    {},
    {"fuse_all_reduce_ops": False},
    {"fp16_allreduce": "bf16", "shared_memory": False},
    {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_program_trains_as_the_eager_loop_does(settings: dict[str, Any]) -> None:
    """With a short last batch, running statistics and a schedule; worker 0's buffers count."""
    expected, found = run_workers(eager, 2, settings), run_workers(captured, 2, settings)
    # bfloat16 rounds sums of another order differently
    limit = 1e-2 if "fp16_allreduce" in settings else 1e-12
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=limit)
    parameters = [name for name, _ in network().named_parameters()]
    for name in parameters:
        assert torch.equal(found[0][name], found[1][name])


def started_differently(settings: dict[str, Any]) -> Any:
    return written(settings, seed=fleet.worker_index())


def test_startup_gives_all_workers_the_values_of_worker_0() -> None:
    expected, found = run_workers(eager, 2, {}), run_workers(started_differently, 2, {})
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    assert torch.equal(found[0]["0.weight"], found[1]["0.weight"])


def different() -> Any:
    model = network()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output if fleet.worker_index() else output * 2, y)

    program = static.capture(model, loss, optimizer, example())
    static.Executor().run(program, example())


def test_error_names_where_programs_of_workers_differ() -> None:
    with pytest.raises(WorkerFailedError, match=r"wrote different programs: operation \d+.*mul"):
        run_workers(different)


def eager_step_beside_program() -> Any:
    model, optimizer, _ = prepared(None)
    static.capture(model, F.cross_entropy, optimizer, example())
    F.cross_entropy(model(example()["x"]), example()["y"]).backward()
    with pytest.raises(PlanError, match="a program makes the steps of this optimizer"):
        optimizer.step()


def test_eager_step_beside_a_program_is_refused() -> None:
    run_workers(eager_step_beside_program)


def saving(folder: str) -> Any:
    model, optimizer, loader = prepared(None)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    executor = static.Executor()
    for x, y in loader:
        executor.run(program, [x, y])
    fleet.save_persistables(folder)
    return captured_on(program, loader, model)


def captured_on(program: static.Program, loader: Any, model: nn.Module) -> Any:
    executor = static.Executor()
    for x, y in loader:
        executor.run(program, [x, y])
    return state_of(model)


def resuming(folder: str, by_program: bool) -> Any:
    model, optimizer, loader = prepared(None, seed=5)
    if by_program:
        program = static.capture(model, F.cross_entropy, optimizer, example())
        fleet.load_persistables(folder)
        return captured_on(program, loader, model)
    fleet.load_persistables(folder)
    for x, y in loader:
        optimizer.minimize(F.cross_entropy(model(x), y))  # type: ignore[attr-defined]
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("by_program", [True, False])
def test_program_and_eager_loop_share_checkpoints(tmp_path: Path, by_program: bool) -> None:
    """Momentum, the loader's position and the model load with and without a program."""
    expected = run_workers(saving, 2, str(tmp_path / "c"))
    found = run_workers(resuming, 2, str(tmp_path / "c"), by_program)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)


def unstarted() -> Any:
    with static.program_guard(static.Program(), static.Program()):
        model = network()
        x, y = static.data("x", [None, 6], "float64"), static.data("y", [None], "int64")
        loss = F.cross_entropy(model(x), y)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.minimize(loss)
        main = static.default_main_program()
    static.Executor().run(main, example())


def test_running_before_startup_is_refused() -> None:
    with pytest.raises(WorkerFailedError, match=re.escape("call exe.run(startup) first")):
        run_workers(unstarted)


def test_main_program_exists_only_after_minimize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.fleet.training.programs._main", None)
    with pytest.raises(PlanError, match="there is no program yet"):
        _ = fleet.main_program


def refused(settings: dict[str, Any], why: str) -> Any:
    model, optimizer, _ = prepared(fleet.DistributedStrategy(**settings))
    with pytest.raises(ConfigError, match=why):
        static.capture(model, F.cross_entropy, optimizer, example())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {
                "compression": "int8",
                "compression_configs": {"exclude": ["head"]},
                "shared_memory": False,
            },
            "exclude: the model has no parameter or module 'head'",
        )
    ],
    ids=["exclude"],
)
def test_features_without_programs_are_refused(settings: dict[str, Any], why: str) -> None:
    run_workers(refused, 2, settings, why)


def captured_twice() -> Any:
    """Two programs of one model and one optimizer alternate."""
    model, optimizer, loader = prepared(None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    both = [static.capture(model, F.cross_entropy, optimizer, example()) for _ in range(2)]
    executor = static.Executor()
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            executor.run(both[number % 2], {"x": x, "y": y})
        schedule.step()
    return state_of(model)


def test_two_programs_of_a_model_train_as_one_program() -> None:
    """The older program also reduces, and weighs its batches as the loader says."""
    expected, found = run_workers(eager, 2, {}), run_workers(captured_twice, 2)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)


class Naming:
    """A pass that gives the loss one more name."""

    name = "naming"

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, form: Form) -> Form:
        fetches = {**form.fetches, self.word: form.fetches["loss"]}
        return form.rewritten(form.graph, f"naming  {self.word}", fetches=fetches)


def rewritten_differently(by_apply: bool) -> Any:
    model, optimizer, _ = prepared(None)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    executor = static.Executor()
    executor.run(program, example())
    before = state_of(model)
    name = ("overlap", "fuse_all_reduce")[fleet.worker_index()]
    if by_apply:
        program = program.apply(Naming(f"loss of {fleet.worker_index()}"))
    else:
        program.passes = [p for p in program.passes if p.name != name]
    with pytest.raises(PlanError, match="the workers wrote different programs"):
        executor.run(program, example())
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("by_apply", [True, False])
def test_rewritten_program_is_compared_again(by_apply: bool) -> None:
    run_workers(rewritten_differently, 2, by_apply)


def rewritten_alone() -> Any:
    model, optimizer, _ = prepared(None)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    static.Executor().run(program, example())
    if fleet.worker_index() == 0:
        program = program.apply(Naming("more"))
    static.Executor().run(program, example())


@pytest.mark.long
def test_program_rewritten_by_one_worker_is_an_error() -> None:
    with pytest.raises(WorkerFailedError, match="run the same program on all of them"):
        run_workers(rewritten_alone, 2, deadline_s=3.0)


def first_values() -> Any:
    model, optimizer, _ = prepared(None)
    own = torch.full((3,), fleet.worker_index() + 1.0).double()
    program = static.capture(
        model, lambda output, y: F.cross_entropy(output * own, y), optimizer, example()
    )
    if fleet.worker_index() == 0:
        # other tensors than at the time the program was written
        loaded = optimizer.state_dict()
        loaded["state"] = {
            number: {"momentum_buffer": torch.full_like(parameter, 3.0)}
            for number, parameter in enumerate(model.parameters())
        }
        optimizer.load_state_dict(loaded)
    static.Executor().run(program, example())
    return own, state_of(model)["0.weight"]


def test_program_starts_with_worker_0s_state_and_its_own_constants() -> None:
    (own, weight), (other, same) = run_workers(first_values, 2)
    assert own.unique() == 1
    assert other.unique() == 2
    assert torch.equal(weight, same)
    # by the learning rate times the remaining momentum
    assert (network()[0].weight - weight).mean() > 0.4


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4).double(), nn.Linear(4, 3).double()


def written_of(whole: Whole, x: Tensor, optimizer: torch.optim.Optimizer, number: int) -> Any:
    program = static.Program()
    with static.program_guard(program):
        out = whole.a(static.data("x", [None, 6], "float64"))
        optimizer.minimize((out if number == 0 else whole.b(out)).square().mean())  # type: ignore[attr-defined]
    executor = static.Executor()
    executor.run(program.startup)
    return lambda: executor.run(program, {"x": x})


def by_parts(is_static: bool) -> Any:
    whole = fleet.distributed_model(Whole())
    some = torch.optim.SGD(whole.a.parameters(), lr=0.1)
    optimizers = some, torch.optim.SGD(whole.parameters(), lr=0.2)
    x = torch.arange(12.0).double().reshape(2, 6) * (fleet.worker_index() + 1) / 12
    if is_static:
        both = [fleet.distributed_optimizer(one) for one in optimizers]
        runs = [written_of(whole, x, one, number) for number, one in enumerate(both)]
        for number in (0, 1, 0, 1):
            runs[number]()
        return state_of(whole)
    for number in (0, 1, 0, 1):
        out = whole.a(x) if number == 0 else whole.b(whole.a(x))
        out.square().mean().backward()
        for parameter in whole.parameters():
            if parameter.grad is not None:
                parameter.grad = fleet.all_reduce(parameter.grad) / 2
        optimizers[number].step()
        optimizers[1].zero_grad()
    return state_of(whole)


def test_programs_train_parts_of_a_registered_model() -> None:
    """Of one model and with two optimizers; the buckets of the programs differ."""
    found, expected = (run_workers(by_parts, 2, is_static)[0] for is_static in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def sharing() -> Any:
    whole = Whole()
    parts = [whole.a.parameters(), whole.parameters()]
    both = [fleet.distributed_optimizer(torch.optim.SGD(part, lr=0.1)) for part in parts]
    x = torch.ones(2, 6).double()
    run = written_of(whole, x, both[0], 0)
    with pytest.raises(PlanError, match="register one module that has them all"):
        written_of(whole, x, both[1], 1)
    run()


def test_programs_that_share_a_module_need_a_common_model() -> None:
    run_workers(sharing)


def failing(settings: dict[str, Any]) -> Any:
    model, optimizer, _ = prepared(fleet.DistributedStrategy(**settings))
    with static.program_guard(static.Program()):
        out = model(static.data("x", [None, 6], "float64"))
        clip = {"clip_norm": 1.0} if settings else {}
        with pytest.raises((PlanError, ConfigError)):
            optimizer.minimize(out.mean() if settings else out, **clip)  # type: ignore[attr-defined]
    model(example()["x"] + fleet.worker_index()).sum().backward()
    optimizer.step()
    return model[3].weight.detach()


@pytest.mark.parametrize("settings", [{"dgc": True, "shared_memory": False}, {}])
def test_optimizer_after_a_failed_minimize_trains_eagerly(settings: dict[str, Any]) -> None:
    one, other = run_workers(failing, 2, settings)
    assert torch.equal(one, other)


def half_merged(folder: str, is_static: bool) -> Any:
    settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, optimizer, _ = prepared(fleet.DistributedStrategy(**settings))
    batches = [(torch.randn(4, 6).double(), example()["y"]) for _ in range(2)]
    strange = torch.full((4, 6), 99.0).double(), example()["y"]
    run = eager_run(model, optimizer)
    if is_static:
        program = static.capture(model, F.cross_entropy, optimizer, example())
        run = lambda x, y: static.Executor().run(program, [x, y])  # noqa: E731
    fleet.save_persistables(folder)
    for batch in batches:
        run(*batch)
    expected = state_of(model)
    run(*strange)
    fleet.load_persistables(folder)
    for batch in batches:
        run(*batch)
    torch.testing.assert_close(state_of(model), expected)


def eager_run(model: nn.Module, optimizer: Any) -> Any:
    def run(x: Tensor, y: Tensor) -> None:
        optimizer.minimize(F.cross_entropy(model(x), y))
        optimizer.zero_grad()

    return run


@pytest.mark.parametrize("is_static", [True, False])
def test_load_drops_merged_gradients(tmp_path: Path, is_static: bool) -> None:
    run_workers(half_merged, 1, str(tmp_path / "c"), is_static)


def program_checkpoint(folder: str) -> Any:
    model, optimizer, _ = prepared(None)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    fleet.save_persistables(folder, program=program)
    before = state_of(model)
    static.Executor().run(program, example())
    fleet.load_persistables(folder, program=program)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)
    other = network()
    stranger = static.capture(other, None, None, {"x": example()["x"]})
    for wrong, match in ((stranger, "is not registered"), (3, "expected a static.Program")):
        with pytest.raises(ConfigError, match=match):
            fleet.save_persistables(folder, program=wrong)
        with pytest.raises(ConfigError, match=match):
            fleet.load_persistables(folder, program=wrong)


def test_checkpoint_saves_the_program_that_trains(tmp_path: Path) -> None:
    run_workers(program_checkpoint, 1, str(tmp_path / "c"))


# Programs train as the eager loop does: hierarchical, with codecs, or with local SGD.


def common_state(train: Any, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The state after a training; all workers must have the same."""
    train(settings)
    fleet.barrier_worker()
    return state_of(current().models[0].module)


@pytest.mark.parametrize("shared", [True, False], ids=["in-memory", "by-gloo"])
def test_hierarchical_all_reduce_equals_the_eager_loop(shared: bool) -> None:
    settings = {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
        "shared_memory": shared,
    }
    # 23 records: the last block has some for each of the four workers
    expected = run_workers(eager, 4, settings, 0, 3)
    found = run_workers(captured, 4, settings, 0, 3)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    for name, _ in network().named_parameters():
        assert all(torch.equal(found[0][name], other[name]) for other in found)


# k_steps does not divide the six steps, so the last average comes early
ALONE: dict[str, dict[str, Any]] = {
    "localsgd": {
        "localsgd": True,
        "localsgd_configs": {"k_steps": 2, "begin_step": 1, "optimizer_state": "reset"},
    },
    "adaptive": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {
            "init_k_steps": 2,
            "begin_step": 0,
            "optimizer_state": "average",
            "buffers": "rank0",
        },
    },
    "diloco": {"diloco": True, "diloco_configs": {"k_steps": 4, "begin_step": 0}},
}


@pytest.mark.parametrize("mode", ALONE)
def test_local_training_equals_the_eager_loop(mode: str) -> None:
    expected, _ = run_workers(common_state, 2, eager, ALONE[mode])
    found, other = run_workers(common_state, 2, captured, ALONE[mode])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name, value in found.items():
        assert torch.equal(value, other[name]), name


def float32_records() -> Any:
    """Codecs take float32."""
    x, y = records().tensors
    return fleet.shard(DataLoader(TensorDataset(x.float(), y), 4, shuffle=True))


def coded_network(settings: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.distributed_model(network().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    strategy = fleet.DistributedStrategy(shared_memory=False, **settings)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def coded_eager(settings: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = coded_network(settings)
    for _ in range(2):
        for x, y in float32_records():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


def coded_program(settings: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    model, optimizer = coded_network(settings)
    example = {"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    program = static.capture(model, F.cross_entropy, optimizer, example)
    executor = static.Executor()
    for _ in range(2):
        for x, y in float32_records():
            executor.run(program, {"x": x, "y": y})
    return state_of(model), program.explain()


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "topk", "compression_configs": {"ratio": 0.2, "min_size": 1}},
        {"compression": "int8", "compression_configs": {"min_size": 1}},
        {
            "dgc": True,
            "dgc_configs": {
                "min_size": 1,
                "sparsity": [0.5, 0.8],
                "rampup_begin_step": 2,
                "rampup_step": 4,
            },
        },
    ],
    ids=["topk", "int8", "dgc"],
)
def test_codecs_equal_the_eager_loop(settings: dict[str, Any]) -> None:
    plain, _ = run_workers(coded_eager, 2, {})
    expected, _ = run_workers(coded_eager, 2, settings)
    (found, explanation), (other, _) = run_workers(coded_program, 2, settings)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found["0.weight"] - plain["0.weight"]).abs().max() > 1e-4
    assert torch.equal(found["0.weight"], other["0.weight"])
    assert "2 of 6 gradients travel as" in explanation


def clipped() -> None:
    model, optimizer = coded_network({"dgc": True, "dgc_configs": {"min_size": 1}})
    example = {"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(PlanError, match=r"local_grad_clip_norm, which clips what a worker sends"):
        static.capture(model, F.cross_entropy, optimizer, example, clip_norm=1.0)


def test_clipping_with_dgc_is_refused() -> None:
    run_workers(clipped, 2)


LOCAL: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 0}}


def saving_locally(folder: str) -> dict[str, Tensor]:
    """Three steps, a checkpoint between two averages, and three more steps."""
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**LOCAL))
    program = static.capture(model, F.cross_entropy, optimizer, example())
    captured_on(program, loader, model)
    fleet.save_persistables(folder)
    return captured_on(program, loader, model)


def resuming_locally(folder: str) -> dict[str, Tensor]:
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**LOCAL), seed=5)
    program = static.capture(model, F.cross_entropy, optimizer, example())
    fleet.load_persistables(folder)
    return captured_on(program, loader, model)


def test_local_training_of_a_program_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    expected, found = (
        run_workers(saving_locally, 2, folder),
        run_workers(resuming_locally, 2, folder),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    # both trained alone when they ended
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])


# Static programs whose batch norms use the batches of all workers.

SYNC: dict[str, Any] = {"sync_batch_norm": True}
MERGE: dict[str, Any] = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
RECOMPUTE: dict[str, Any] = {"recompute": True, "recompute_configs": {"checkpoints": ["1"]}}
AMP: dict[str, Any] = {"amp": True}


def test_synced_norms_equal_those_of_one_process() -> None:
    """With a short last batch."""
    expected = run_workers(eager, 1, {}, 0, 8)[0]
    for found in (*run_workers(captured, 2, SYNC), *run_workers(written, 2, SYNC)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def with_a_repeated_batch(in_program: bool) -> Any:
    """Worker 1's records count zero, as when they fill a short block."""
    model, optimizer, _ = prepared(fleet.DistributedStrategy(**SYNC))
    program = None
    if in_program:
        program = static.capture(model, F.cross_entropy, optimizer, example())
    for first in range(0, 12, 4):
        x, y = records()[first : first + 4]
        current().models[0].set_batch_weight(0.0 if fleet.worker_index() else 2.0)
        if program is None:
            optimizer.minimize(F.cross_entropy(model(x), y))  # type: ignore[attr-defined]
            optimizer.zero_grad()
        else:
            static.Executor().run(program, {"x": x, "y": y})
    return state_of(model)


def test_repeated_records_do_not_count_in_synced_norms() -> None:
    expected = run_workers(with_a_repeated_batch, 2, False)
    for one, other in zip(run_workers(with_a_repeated_batch, 2, True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("more", [{}, MERGE, RECOMPUTE], ids=["alone", "merge", "recompute"])
def test_synced_norms_with_other_passes(more: dict[str, Any]) -> None:
    expected = run_workers(eager, 2, {**SYNC, **more})
    for one, other in zip(run_workers(captured, 2, {**SYNC, **more}), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def narrow_norms() -> bool:
    """Autocast feeds a norm bfloat16 values."""
    strategy = fleet.DistributedStrategy(**SYNC, **AMP)
    model = fleet.distributed_model(network().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fleet.distributed_optimizer(optimizer, strategy)
    inputs = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    program = static.capture(model, F.cross_entropy, optimizer, inputs)
    for _ in range(2):
        static.Executor().run(program, inputs)
    return all(bool(value.isfinite().all()) for value in model.state_dict().values())


def test_synced_norms_of_narrow_values() -> None:
    assert run_workers(narrow_norms) == [True, True]


def used_elsewhere(folder: str) -> Any:
    """Evaluation, saving and export need no other worker: worker 0 does them alone."""
    model, optimizer, loader = prepared(fleet.DistributedStrategy(**SYNC))
    program = static.capture(model, F.cross_entropy, optimizer, example())
    executor = static.Executor()
    for x, y in loader:
        executor.run(program, {"x": x, "y": y})
    assert "1 batch norms use the batches of all workers" in program.explain()
    if fleet.worker_index():
        return None
    test = program.clone(for_test=True)
    x, y = records()[:5]
    before = state_of(model)
    [loss] = executor.run(test, {"x": x, "y": y}, ["loss"])
    program.save(folder)
    loaded = static.load_program(folder)
    assert "synced_norm" not in str(loaded)
    [again] = executor.run(loaded.clone(for_test=True), {"x": x, "y": y}, ["loss"])
    model.eval()
    expected = F.cross_entropy(model(x), y)
    assert all(torch.equal(before[name], value) for name, value in state_of(model).items())
    return loss.item(), again.item(), expected.item()


def test_other_uses_of_a_program_with_synced_norms(tmp_path: Path) -> None:
    loss, again, expected = run_workers(used_elsewhere, 2, str(tmp_path / "program"))[0]
    assert loss == pytest.approx(expected, abs=1e-12)
    assert again == pytest.approx(expected, abs=1e-12)
