# SPDX-License-Identifier: Apache-2.0
"""From one machine to several, line by line; `README.md` has a table of claims and tests."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.workplace import free_ports
from tests.ported.jobs import FLEETRUN, ended, logs, numbers, run, start
from tests.ported.multi_machine.random_mlp import gen_data
from tests.workers import run_processes

import fleetlight as fleet

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
COST = r"cost=([\d.]+)"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The costs on one machine, which equal batches on several machines reproduce."""
    folder = tmp_path_factory.mktemp("alone")
    costs = numbers(COST, run(folder, sys.executable, HERE / "train.py"))
    assert fleet.static.load_program(folder / "model").feeds.keys() == {"x", "y"}
    return costs


def test_the_program_runs_on_one_machine(alone: list[float]) -> None:
    assert len(alone) == 20
    assert all(0.3 < cost < 3 for cost in alone)


def test_the_four_changes_keep_the_results(alone: list[float], tmp_path: Path) -> None:
    output = run(tmp_path, *FLEETRUN, "--nproc_per_node", "2", HERE / "train_with_fleet.py")
    for text in logs(tmp_path / "log"):
        # all workers have equal batches, so the mean gradient is unchanged
        assert numbers(COST, text) == pytest.approx(alone, abs=2e-6)
    assert "write fleet.save_persistables(dirname)" in output
    assert "saved model at step 20" in output
    assert (tmp_path / "model" / "manifest.json").exists()
    feed = {name: torch.from_numpy(value) for name, value in gen_data(0).items()}
    served = fleet.load_inference_model(tmp_path / "served")
    [cost] = set(numbers(r"served cost ([\d.]+)", logs(tmp_path / "log")))
    assert float(served(feed["x"], feed["y"])) == pytest.approx(cost, abs=2e-6)


def test_each_worker_has_a_log(tmp_path: Path) -> None:
    flags = ["--nproc_per_node", "4", "--log_dir", "mylog"]
    run(tmp_path, *FLEETRUN, *flags, HERE / "train_tuned.py")
    texts = logs(tmp_path / "mylog")
    assert len(texts) == 4
    assert len({tuple(numbers(COST, text)) for text in texts}) == 1


def test_missing_gpus_are_an_error(tmp_path: Path) -> None:
    flags = ["--selected_gpus=0,1,2,3,4,5,6,7", "--log_dir", "mylog"]
    script = HERE / "train_with_fleet.py"
    output = run(tmp_path, *FLEETRUN, *flags, script, code=2, CUDA_VISIBLE_DEVICES="")
    assert "this machine has no GPU; use --nproc_per_node 8" in output


def test_help_names_the_flags(tmp_path: Path) -> None:
    output = run(tmp_path, *FLEETRUN, "--help")
    for flag in ("--cluster_node_ips", "--node_ip", "--started_port", "--selected_gpus"):
        assert flag in output


def test_two_machines_train_together(alone: list[float], tmp_path: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    flags = [f"--cluster_node_ips={','.join(hosts)}", f"--started_port={free_ports(hosts, 4)}"]
    launchers = [
        start(
            tmp_path, *FLEETRUN, *flags, f"--node_ip={host}", "--log_dir", f"log{host[-1]}",
            "--nproc_per_node", "1", HERE / "train_with_fleet.py",
        )
        for host in hosts
    ]  # fmt: skip
    ended(*launchers)
    # node 0 has a copy of the other machine's log
    paths = [
        tmp_path / path for path in ("log1/workerlog.0", "log2/workerlog.1", "log1/workerlog.1")
    ]
    costs = [numbers(COST, path.read_text()) for path in paths]
    assert costs[0] == costs[1] == costs[2] == pytest.approx(alone, abs=2e-6)


def test_variables_of_a_cloud_start_the_job(tmp_path: Path) -> None:
    variables = {"PADDLE_TRAINERS": "127.0.0.1", "POD_IP": "127.0.0.1", "PADDLE_TRAINER_ID": 0}
    arguments = ["--model=ResNet50", "--data_dir=./ImageNet"]
    script = HERE / "train_with_fleet.py"
    command = [*FLEETRUN, "--use_paddlecloud", "--nproc_per_node", "2", script, *arguments]
    output = run(tmp_path, *command, **variables)
    assert str(arguments) in output
    assert "done: all 2 workers" in output


def test_variables_tune_the_communication(tmp_path: Path) -> None:
    variables = {
        "FLAGS_sync_nccl_allreduce": 1,
        "FLAGS_fuse_parameter_memory_size": 16,
        "FLAGS_fuse_parameter_groups_size": 3,
        "FLAGS_fraction_of_gpu_memory_to_use": 0.95,
        "NCCL_IB_DISABLE": 1,
    }
    command = [*FLEETRUN, "--nproc_per_node", "2", HERE / "train_tuned.py", "explain"]
    output = run(tmp_path, *command, **variables)
    assert "all_reduce: 6 -> 2" in output
    for name in ("fuse_grad_size_in_MB", "fuse_grad_size_in_num", "sync_nccl_allreduce"):
        assert name in output
    assert "FLAGS_fraction_of_gpu_memory_to_use" in output


@pytest.mark.parametrize("how", ["plain", "hierarchical", "localsgd"])
def test_the_tuned_program_trains(how: str, tmp_path: Path) -> None:
    command = [*FLEETRUN, "--nproc_per_node", "2", HERE / "train_tuned.py", how, "explain"]
    output = run(tmp_path, *command)
    costs = [numbers(COST, text) for text in logs(tmp_path / "log")]
    # fetched at every second run
    assert len(costs[0]) == 10
    assert costs[0] == costs[1]
    assert "operators of a program run on 3 threads" in output
    assert "there is no scope to drop" in output
    if how != "plain":
        assert (
            f"{'localsgd' if how == 'localsgd' else 'use_hierarchical_allreduce'} = True" in output
        )


def tuned(*arguments: str) -> Any:
    """The tuned program in this process; returns its parameters after each step, in one array."""
    sys.argv[1:] = arguments
    sys.path.insert(0, str(HERE))
    ended = runpy.run_path(str(HERE / "train_tuned.py"))
    if "hierarchical" in arguments:
        assert " * use_hierarchical_allreduce = True" in ended["dist_strategy"].explain()
    fleet.stop_worker()
    steps = ended["weights"]
    return np.stack([np.concatenate([value.ravel() for value in step]) for step in steps])


def steps_apart(*arguments: str, workers: int) -> tuple[list[int], Any]:
    """The steps after which workers with different batches differ, and the first parameters."""
    found = run_processes(tuned, [("apart", *arguments)] * workers)
    same = [all(np.array_equal(found[0][i], other[i]) for other in found) for i in range(20)]
    return [step for step, is_same in enumerate(same, 1) if not is_same], found[0]


def test_localsgd_averages_every_four_steps() -> None:
    apart, weights = steps_apart("localsgd", workers=2)
    # four warm-up steps, each with averaging
    assert apart == [5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19]
    none, together = steps_apart(workers=2)
    assert none == []
    assert np.array_equal(weights[:4], together[:4])
    assert not np.allclose(weights[-1], together[-1], rtol=0, atol=1e-9)


def test_hierarchical_allreduce_sums_over_all_workers() -> None:
    none, weights = steps_apart("hierarchical", workers=4)
    assert none == []
    _, plain = steps_apart(workers=4)
    np.testing.assert_allclose(weights, plain, rtol=0, atol=1e-6)
