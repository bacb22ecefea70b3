# SPDX-License-Identifier: Apache-2.0
"""Notebook cells that run again: `fleet.init` twice, and `fleet.reset`."""

import atexit
import builtins
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.workers import run_processes, run_workers
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import fleetlight as fleet
from fleetlight import static
from fleetlight.errors import CheckpointError, ConfigError, PlanError
from fleetlight.fleet.checkpoints import autosave
from fleetlight.fleet.checkpoints.stop_agreement import StopAgreement
from fleetlight.fleet.job import Job, current, current_or_none
from fleetlight.strategy import current_job

pytestmark = pytest.mark.multiprocess

FIRST = """
import torch
from torch import nn
import fleetlight as fleet

strategy = fleet.DistributedStrategy(**settings)
fleet.init(is_collective=is_collective, strategy=strategy)
"""
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20, 4) if is_collective else fleet.nn.SparseEmbedding(4)
        self.linear = nn.Linear(8, 1)

    def forward(self, ids):
        return self.linear(self.rows(ids).flatten(1))

torch.manual_seed(0)
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
"""
TRAIN = """
ids = torch.arange(8).view(4, 2)
losses = []
for _ in range(3):
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    losses.append(loss.item())
"""
CELLS = [FIRST, MODEL, TRAIN]
RESET = "import fleetlight as fleet\nfleet.reset()"
ASYNC: dict[str, Any] = {"a_sync": True}
GEO: dict[str, Any] = {"a_sync": True, "a_sync_configs": {"k_steps": 2}}


def in_notebook(is_collective: bool, settings: dict[str, Any], cells: list[str]) -> list[Any]:
    """The losses of all cells, run twice in one namespace."""
    names: dict[str, Any] = {"is_collective": is_collective, "settings": settings}
    runs = []
    for _ in range(2):
        for cell in cells:
            exec(cell, names)
        runs.append(names["losses"])
    fleet.reset()
    return runs


@pytest.mark.parametrize(
    ("is_collective", "settings"), [(False, ASYNC), (True, {}), (False, {}), (False, GEO)]
)
def test_cells_that_begin_with_reset_run_again(
    is_collective: bool, settings: dict[str, Any]
) -> None:
    [runs] = run_processes(in_notebook, [(is_collective, settings, [RESET, *CELLS])])
    first, second = runs
    assert first == second or settings == ASYNC
    assert first[0] == second[0]


def test_cells_that_end_with_stop_worker_run_again() -> None:
    [runs] = run_processes(in_notebook, [(False, {}, [*CELLS, "fleet.stop_worker()"])])
    assert runs[0] == runs[1]


def test_collective_cells_run_again_without_reset() -> None:
    [runs] = run_processes(in_notebook, [(True, {}, CELLS)])
    assert runs[0] == runs[1]


def test_second_model_with_servers_needs_reset() -> None:
    [text] = run_processes(error_text, [(PlanError, in_notebook, False, {}, CELLS)])
    assert "distributed_model was called after fleet.init_worker()" in text
    assert "call fleet.reset() and then fleet.init()" in text


def called_again() -> list[str]:
    """In a job of two workers, already initialised."""
    model = fleet.distributed_model(nn.Linear(2, 1))
    fleet.init(is_collective=True)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    assert [plan.module for plan in current().models] == [model]
    model(torch.ones(1, 2))
    fleet.init(is_collective=True)
    maker = fleet.UserDefinedRoleMaker(is_collective=True, worker_num=3)
    other = fleet.DistributedStrategy(amp=True)
    return [
        error_text(ConfigError, fleet.init),
        error_text(ConfigError, fleet.init, None, True, other),
        error_text(ConfigError, fleet.init, maker),
    ]


def test_second_init_changes_nothing_and_names_other_arguments() -> None:
    for mode, strategy, role in run_workers(called_again):
        assert (
            "other arguments: is_collective = True, now False; repeat the first arguments" in mode
        )
        assert "strategy.amp = False, now True" in strategy
        assert "role.worker_num = 2, now 3" in role
        assert all("fleet.reset() first" in text for text in (mode, strategy, role))


def followed() -> None:
    """A cell creates its strategy again, and a later cell changes it."""
    fleet.init(is_collective=True)
    for strategy in (fleet.DistributedStrategy(), fleet.DistributedStrategy()):
        fleet.init(is_collective=True, strategy=strategy)
        assert current().strategy is strategy
    strategy.amp = True
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(nn.Linear(2, 1))
    model(torch.ones(1, 2))
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    assert current().strategy is strategy


def test_second_init_takes_an_equal_strategy_before_training() -> None:
    run_processes(followed, [()])


def failed_first() -> None:
    begin = autosave.watch_in_worker

    def refuse(context: Job, calls: StopAgreement) -> None:
        raise CheckpointError("nothing to resume from")

    autosave.watch_in_worker = refuse
    with pytest.raises(CheckpointError):
        fleet.init(is_collective=True)
    autosave.watch_in_worker = begin
    fleet.init()
    assert fleet.worker_num() == 1


def test_failed_init_may_be_corrected() -> None:
    run_processes(failed_first, [()])


def left_in_job() -> tuple[bool, str]:
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fleet.reset()
    return hasattr(optimizer, "minimize"), error_text(ConfigError, fleet.init, None, True)


def test_reset_leaves_the_job_for_good() -> None:
    for registered, text in run_workers(left_in_job):
        assert not registered
        assert "this process has left its job" in text


def package_hooks() -> set[str]:
    """The current exit hooks of the package."""
    register, unregister = atexit.register, atexit.unregister
    hooks: set[str] = set()

    def recording(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__module__.startswith("fleetlight"):
            hooks.add(function.__name__)
        return register(function, *args, **kwargs)

    def removing(function: Any) -> None:
        hooks.discard(function.__name__)
        unregister(function)

    atexit.register, atexit.unregister = recording, removing  # type: ignore[assignment]
    return hooks


def nothing_is_left(is_collective: bool, settings: dict[str, Any]) -> None:
    there = (sys.excepthook, sys.exit, nn.Module.__call__, torch.autograd.backward)
    quits = {name: vars(builtins).get(name) for name in ("exit", "quit")}
    threads, hooks = set(threading.enumerate()), package_hooks()
    scheduler_new = LRScheduler.__new__
    names: dict[str, Any] = {"is_collective": is_collective, "settings": settings}
    for cell in CELLS:
        exec(cell, names)
    plain = vars(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)).keys()
    old, adagrad = weakref.ref(names["model"]), weakref.ref(names["optimizer"])
    context = weakref.ref(current())
    fleet.reset()
    fleet.reset()
    assert current_or_none() is None
    assert not [t.name for t in set(threading.enumerate()) - threads]
    assert not hooks
    assert there == (sys.excepthook, sys.exit, nn.Module.__call__, torch.autograd.backward)
    assert quits == {name: vars(builtins).get(name) for name in ("exit", "quit")}
    assert LRScheduler.__new__ is scheduler_new
    assert "forward" not in vars(names["model"])
    # attributes set by its scheduler stay
    assert vars(names["optimizer"]).keys() - plain <= {"step", "_opt_called"}
    assert not current_job().has_programs
    assert current_job().deadline_s is None
    names.clear()
    gc.collect()
    assert (old(), adagrad(), context()) == (None, None, None)


@pytest.mark.parametrize(
    ("is_collective", "settings"),
    [
        (False, ASYNC),
        (True, {}),
        (True, {"recompute": True, "recompute_configs": {"checkpoints": ["linear"]}}),
        (False, {}),
        (False, GEO),
    ],
)
def test_reset_leaves_nothing_behind(is_collective: bool, settings: dict[str, Any]) -> None:
    run_processes(nothing_is_left, [(is_collective, settings)])


def programs_forgotten() -> None:
    # the first default program existed before the fork
    gc.unfreeze()
    for _ in range(2):
        fleet.init(is_collective=True)
        x = static.data("x", [None, 2])
        model = nn.Linear(2, 1)
        loss = model(x).square().mean()
        optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.minimize(loss)
        executor = static.Executor()
        executor.run(static.default_startup_program())
        program = weakref.ref(fleet.main_program)
        executor.run(fleet.main_program, {"x": torch.ones(3, 2)})
        old = weakref.ref(model)
        # a program that is being written
        fleet.reset()
        assert not hasattr(fleet, "main_program")
        del x, model, loss, optimizer, executor
        gc.collect()
        assert (old(), program()) == (None, None)


def test_reset_forgets_programs() -> None:
    run_processes(programs_forgotten, [()])


def registered_again(moved: bool) -> None:
    """Rows vanish with the servers; a model without rows still trains."""
    rows = nn.Embedding(10, 4, sparse=True) if moved else fleet.nn.SparseEmbedding(4)
    model = nn.Sequential(rows, nn.Linear(4, 1))
    fleet.init()
    fleet.distributed_model(model)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(3)).sum().backward()
    fleet.reset()
    with pytest.raises(PlanError, match=r"a job that fleet\.reset\(\) has ended; build the model"):
        model(torch.arange(3))
    fleet.init()
    with pytest.raises(PlanError, match=r"the rows of 0 were in a job .* build the model again"):
        fleet.distributed_model(model)
    fleet.reset()
    dense = nn.Linear(4, 1)
    for _ in range(2):
        fleet.init()
        fleet.distributed_model(dense)
        sgd = fleet.distributed_optimizer(torch.optim.SGD(dense.parameters(), lr=0.1))
        before = dense.weight.detach().clone()
        dense(torch.ones(1, 4)).sum().backward()
        sgd.step()
        assert torch.allclose(dense.weight, before - 0.1)
        sgd.zero_grad()
        fleet.reset()
    dense(torch.ones(1, 4)).sum().backward()
    sgd.step()
    assert torch.allclose(dense.weight, before - 0.2)


@pytest.mark.parametrize("moved", [False, True])
def test_model_with_lost_rows_is_refused_after_reset(moved: bool) -> None:
    run_processes(registered_again, [(moved,)])
