# SPDX-License-Identifier: Apache-2.0
"""`fleet.init` and `fleet.stop_worker`: modes, arguments, ranks."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import run_processes, run_workers

import fleetlight as fleet
from fleetlight.errors import CheckpointError, ConfigError, RoleError, StrategyError
from fleetlight.fleet.job import current, current_or_none
from fleetlight.fleet.lifecycle import _deadline
from fleetlight.observe.log import logger
from fleetlight.roles import Role


def test_calls_before_init_name_the_remedy() -> None:
    assert current_or_none() is None
    for call in (fleet.worker_index, fleet.barrier_worker, fleet.is_first_worker):
        with pytest.raises(ConfigError, match=r"call fleet\.init"):
            call()
    fleet.stop_worker()


def test_workers_without_servers_need_is_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_ROLE", "worker")
    monkeypatch.setenv("FLEET_INDEX", "0")
    monkeypatch.setenv("FLEET_WORKER_NUM", "2")
    monkeypatch.setenv("FLEET_MASTER", "127.0.0.1:4711")
    with pytest.raises(RoleError, match=r"fleet\.init\(is_collective=True\)"):
        fleet.init()


def test_collective_with_servers_is_refused() -> None:
    maker = fleet.UserDefinedRoleMaker(
        worker_endpoints=["127.0.0.1:1"], server_endpoints=["127.0.0.1:2"]
    )
    with pytest.raises(RoleError, match="the job has 1 parameter servers"):
        fleet.init(maker, is_collective=True)


def test_away_time_above_the_deadline_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_DEADLINE_S", "60")
    strategy = fleet.DistributedStrategy(durability="log", durability_configs={"away_s": 90})
    with pytest.raises(StrategyError, match="away_s = 90, expected less than deadline_s = 60"):
        fleet.init(strategy=strategy)
    assert current_or_none() is None


def warned_at_init() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    fleet.init(is_collective=True)
    fleet.stop_worker()
    logger.removeHandler(handler)
    return [text for text in records if "does not read it" in text]


def in_foreign_environment(env: dict[str, str]) -> list[str]:
    os.environ.update(env)
    return warned_at_init()


def test_variables_of_other_systems_warn_once_per_job() -> None:
    env = {"CPU_NUM": "4", "FLAGS_communicator_send_queue_size": "8", "MS_NODE_TIMEOUT": ""}
    first, second = run_processes(in_foreign_environment, [(env,), (env,)])
    cpu, queue = first
    assert cpu.startswith("CPU_NUM is set, but Fleetlight does not read it: ")
    assert queue.endswith("use strategy.a_sync_configs.send_queue_size")
    assert second == []


@pytest.mark.parametrize(
    ("is_collective", "settings"), [(False, {}), (True, {}), (True, {"durability": "log"})]
)
def test_resume_without_saved_state_is_refused(
    is_collective: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_RESUME", "1")
    strategy = fleet.DistributedStrategy(**settings)
    with pytest.raises(ConfigError, match="saves nothing to resume from: start it with"):
        fleet.init(is_collective=is_collective, strategy=strategy)
    assert current_or_none() is None


def test_resume_begins_without_saved_state_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_RESUME", "auto")
    fleet.init()
    assert current_or_none() is not None
    fleet.reset()


def identity() -> Any:
    fleet.init(is_collective=True)
    facts = (
        fleet.worker_index(),
        fleet.worker_num(),
        fleet.local_rank(),
        fleet.node_num(),
        fleet.is_worker(),
        fleet.is_server(),
        fleet.is_first_worker(),
        fleet.server_num(),
        fleet.server_endpoints(),
        len(fleet.worker_endpoints()),
    )
    fleet.stop_worker()
    fleet.stop_worker()
    return facts


@pytest.mark.multiprocess
def test_ranks_and_roles() -> None:
    zero, one = run_workers(identity)
    assert zero == (0, 2, 0, 1, True, False, True, 0, [], 2)
    assert one == (1, 2, 1, 1, True, False, False, 0, [], 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((True,), r"is a bool, expected a RoleMaker; write fleet\.init\(is_collective=True"),
        ((fleet.DistributedStrategy(),), r"role_maker is a .*; write fleet\.init\(strategy="),
        ((None, True, {"amp": True}), "strategy is a dict, expected a DistributedStrategy"),
        ((None, fleet.DistributedStrategy()), r"is_collective .*; write fleet\.init\(strategy="),
        ((None, True, fleet.RoleMaker(env={})), r"strategy .*; write fleet\.init\(role_maker="),
    ],
)
def test_swapped_arguments_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fleet.init(*arguments)


def init_again() -> str:
    fleet.stop_worker()
    with pytest.raises(ConfigError) as caught:
        fleet.init(is_collective=True)
    return str(caught.value)


@pytest.mark.multiprocess
def test_process_that_left_cannot_join_again() -> None:
    for text in run_workers(init_again):
        assert "this process has left its job" in text


def stop_after_a_failed_save(path: str) -> list[str]:
    """A background save fails; the session still ends and the worker leaves the job."""
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    session = current().session
    assert session is not None
    ended, stop = [], session.stop
    session.stop = lambda: (stop(), ended.append("stopped"))  # type: ignore[assignment, func-returns-value]
    fleet.save_persistables(path, background=True)
    with pytest.raises(CheckpointError, match="failed in the background"):
        fleet.stop_worker()
    return [*ended, str(current_or_none())]


@pytest.mark.multiprocess
def test_worker_leaves_after_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / "file")
    assert run_processes(stop_after_a_failed_save, [(path,)]) == [["stopped", "None"]]


def stop_with_a_failing_last_push() -> list[str]:
    """The raised error is the cause; the worker sends no goodbye over closed lanes."""
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    session = current().session
    assert session is not None

    def stop() -> None:
        raise ValueError("the real cause")

    session.stop = stop  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the real cause") as caught:
        fleet.stop_worker()
    return [str(caught.value.__context__), str(current_or_none())]


@pytest.mark.multiprocess
def test_error_of_the_last_push_is_raised() -> None:
    assert run_processes(stop_with_a_failing_last_push, [()]) == [["None", "None"]]


def deadline() -> str:
    return fleet.DistributedStrategy().explain()


@pytest.mark.multiprocess
def test_explain_names_the_deadline_of_the_environment() -> None:
    for text in run_workers(deadline, deadline_s=17.0):
        assert "17 s are in force, from FLEET_DEADLINE_S" in text


def test_deadline_names_the_variable_of_a_dialect() -> None:
    role = Role(dialect="any", deadline_s=9.0, deadline_variable="ANY_TIMEOUT")
    assert _deadline(role, fleet.DistributedStrategy()) == (9.0, "ANY_TIMEOUT")
    assert _deadline(role, fleet.DistributedStrategy(deadline_s=3)) == (3.0, "the strategy")
    assert _deadline(role.replace(deadline_s=None), fleet.DistributedStrategy())[1] == "the default"
