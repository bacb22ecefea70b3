# SPDX-License-Identifier: Apache-2.0
"""Variables of other systems: each is named with its replacement."""

import re
from pathlib import Path

import pytest

from fleetlight.roles.environment import from_environment
from fleetlight.roles.unsupported import UNSUPPORTED, is_unsupported, unsupported_variables
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.strategy import variables_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("FLAGS_fraction_of_gpu_memory_to_use", "set_per_process_memory_fraction"),
        ("FLAGS_communicator_send_queue_size", "strategy.a_sync_configs.send_queue_size"),
        ("FLAGS_communicator_max_merge_var_num", "strategy.a_sync_configs.max_merge"),
        ("FLAGS_communicator_thread_pool_size", "strategy.a_sync_configs;"),
        ("CPU_NUM", "OMP_NUM_THREADS"),
        ("MS_ENABLE_RECOVERY", "durability='log'"),
        ("MS_NODE_TIMEOUT", "FLEET_DEADLINE_S"),
        ("PADDLE_ELASTIC_NP", "--nnodes MIN:MAX"),
        ("PADDLE_ELASTIC_TIMEOUT", "FLEET_DEADLINE_S"),
        ("HOROVOD_FUSION_THRESHOLD", "fuse_grad_size_in_MB"),
        ("OMPI_COMM_WORLD_SIZE", "fleetrun, torchrun or srun"),
    ],
)
def test_each_variable_has_one_sentence_with_its_replacement(name: str, instead: str) -> None:
    (sentence,) = unsupported_variables({name: "3", "PATH": "/bin"})
    assert sentence.startswith(f"{name} is set, but Fleetlight does not read it: ")
    assert instead in sentence


def test_empty_variable_counts_as_unset() -> None:
    assert unsupported_variables({"CPU_NUM": " "}) == []


def test_values_are_not_shown() -> None:
    (sentence,) = unsupported_variables({"PADDLE_GLOO_FS_UGI": "me,hunter2"})
    assert "hunter2" not in sentence


@pytest.mark.parametrize(
    "name",
    [
        *variables_of(DistributedStrategy),
        *("PADDLE_TRAINER_ID", "PADDLE_PORT", "PADDLE_TRAINERS", "TRAINING_ROLE", "POD_IP"),
        *("FLAGS_selected_gpus", "MS_ROLE", "MS_TOPO_TIMEOUT", "MS_WORKER_IP", "MS_NODE_ID"),
        *("NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME", "RANK", "SLURM_PROCID", "OMP_NUM_THREADS"),
    ],
)
def test_variables_that_fleetlight_reads_are_not_foreign(name: str) -> None:
    assert not is_unsupported(name)


def test_foreign_variables_select_no_dialect() -> None:
    names = ["CPU_NUM", "PADDLE_ELASTIC_NP", "PADDLE_MASTER", "MS_NODE_TIMEOUT", "DMLC_ROLE"]
    assert all(is_unsupported(name) for name in names)
    assert from_environment(dict.fromkeys(names, "2")).worker_num == 1


def test_documentation_lists_all_variables() -> None:
    shown = set(re.findall(r"`([A-Z][A-Za-z_]+)[`*.]", (DOCS / "migrating.md").read_text()))
    for rule in UNSUPPORTED:
        assert any(re.fullmatch(rule, name) for name in shown), rule
