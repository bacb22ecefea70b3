# SPDX-License-Identifier: Apache-2.0
"""All public names; after `import fleetlight as fleet` they are `fleet.<name>`."""

from __future__ import annotations

from fleetlight import errors
from fleetlight.fleet.checkpoints.persistables import load_persistables, save_persistables
from fleetlight.fleet.checkpoints.whole_state import load_state_dict, state_dict
from fleetlight.fleet.exit.exit_status import install_startup_hook
from fleetlight.fleet.lifecycle import (
    init,
    init_server,
    init_worker,
    reset,
    run_server,
    stop_worker,
)
from fleetlight.fleet.public.collectives import (
    all_gather,
    all_reduce,
    barrier_worker,
    clip_grad_norm_,
)
from fleetlight.fleet.public.identity import (
    is_first_worker,
    is_server,
    is_worker,
    local_rank,
    node_num,
    nranks,
    rank,
    server_endpoints,
    server_index,
    server_num,
    worker_endpoints,
    worker_index,
    worker_num,
    world_size,
)
from fleetlight.fleet.public.inference import load_inference_model, save_inference_model
from fleetlight.fleet.public.perf import account, collective_perf
from fleetlight.fleet.public.publishing import publish
from fleetlight.fleet.public.rows import rows, shrink
from fleetlight.fleet.public.sharding import progress, shard
from fleetlight.fleet.public.stepping import run_steps
from fleetlight.fleet.recording.process_metrics import log, process_metrics
from fleetlight.fleet.training.model import no_sync
from fleetlight.fleet.training.registering import attach, distributed_model, distributed_optimizer
from fleetlight.ps.layers.entries import (
    CountFilterEntry,
    ProbabilityEntry,
    ScoreEntry,
    ShowClickEntry,
)
from fleetlight.roles import Role, RoleMaker, UserDefinedRoleMaker
from fleetlight.roles import RoleMaker as PaddleCloudRoleMaker
from fleetlight.strategy import DistributedStrategy

# settings that a script makes before `init` may be wrong as well
install_startup_hook()

__all__ = [
    "CountFilterEntry",
    "DistributedStrategy",
    "PaddleCloudRoleMaker",
    "ProbabilityEntry",
    "Role",
    "RoleMaker",
    "ScoreEntry",
    "ShowClickEntry",
    "UserDefinedRoleMaker",
    "account",
    "all_gather",
    "all_reduce",
    "attach",
    "barrier_worker",
    "clip_grad_norm_",
    "collective_perf",
    "distributed_model",
    "distributed_optimizer",
    "errors",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_inference_model",
    "load_persistables",
    "load_state_dict",
    "local_rank",
    "log",
    "no_sync",
    "node_num",
    "nranks",
    "process_metrics",
    "progress",
    "publish",
    "rank",
    "reset",
    "rows",
    "run_server",
    "run_steps",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shard",
    "shrink",
    "state_dict",
    "stop_worker",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]
