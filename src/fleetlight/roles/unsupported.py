# SPDX-License-Identifier: Apache-2.0
"""Variables of other systems that Fleetlight does not read, and what to use instead.

`roles/dialects` has the variables that describe roles, and `setting(..., variable=...)` those
that give a setting its default. `UNSUPPORTED` has the rest, so that `fleet.init` warns of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_MEMORY = (
    "torch's allocator grows on demand; torch.cuda.set_per_process_memory_fraction limits it and "
    "PYTORCH_CUDA_ALLOC_CONF tunes it"
)
_FREED = "reference counts free tensors at once"
_DEADLINE = "use strategy.deadline_s or FLEET_DEADLINE_S"
_THREADS = "use OMP_NUM_THREADS or torch.set_num_threads"
_CUDNN = "use torch.backends.cudnn.benchmark and torch.backends.cudnn.benchmark_limit"
_DENSE = "each push returns the dense values"
_BUCKETS = "use strategy.fuse_grad_size_in_MB"
_RECOVERY = (
    "use fleetrun --max_restarts with strategy.durability='log' for servers, or strategy.checkpoint"
)
_ELASTIC = "use fleetrun --nnodes MIN:MAX --master host:port and --max_restarts"
_FLEETRUN = "it belongs to another launcher; start the job by fleetrun"
_NO_GLOO = "workers have barriers and metrics without it"
_DEVICES = "Fleetlight trains on CPUs and NVIDIA GPUs; use fleetrun --gpus or --nproc_per_node"
_HETER = "all workers of a job are alike; use fleetrun --server_num and --worker_num"
_TRACE = "use torch.profiler, and fleet.account() for communication"
_LOG = "use logging.getLogger('fleetlight').setLevel, and TORCH_CPP_LOG_LEVEL for torch's C++"
_NO_MPI = "mpirun's ranks are not read; start the job by fleetrun, torchrun or srun"

#: {pattern of a name: what to use instead}; the first matching pattern counts
UNSUPPORTED: Mapping[str, str] = {
    # PaddlePaddle Fleet
    "FLAGS_fraction_of_gpu_memory_to_use": _MEMORY,
    "FLAGS_(initial|reallocate)_gpu_memory_in_mb": _MEMORY,
    "FLAGS_gpu_memory_limit_mb": _MEMORY,
    "FLAGS_allocator_strategy": _MEMORY,
    "FLAGS_eager_delete_tensor_gb": _FREED,
    "FLAGS_fast_eager_deletion_mode": _FREED,
    "FLAGS_memory_fraction_of_eager_deletion": _FREED,
    "FLAGS_cudnn_exhaustive_search": _CUDNN,
    "FLAGS_conv_workspace_size_limit": _CUDNN,
    "FLAGS_cudnn_batchnorm_spatial_persistent": "cuDNN chooses the batch-norm mode automatically",
    "FLAGS_cudnn_deterministic": "use torch.use_deterministic_algorithms(True)",
    "FLAGS_communicator_send_queue_size": "use strategy.a_sync_configs.send_queue_size",
    "FLAGS_communicator_max_merge_var_num": "use strategy.a_sync_configs.max_merge",
    "FLAGS_communicator_independent_recv_thread": _DENSE,
    "FLAGS_communicator_min_send_grad_num_before_recv": _DENSE,
    "FLAGS_communicator_.*": "use strategy.a_sync_configs; a push leaves as soon as it is ready",
    "FLAGS_rpc_deadline": _DEADLINE,
    "FLAGS_stop_check_timeout": _DEADLINE,
    "FLAGS_rpc_retry_times": f"broken connections are retried until the deadline; {_DEADLINE}",
    "FLAGS_LAUNCH_BARRIER": "workers wait for all servers until the deadline",
    "FLAGS_START_PORT": "use fleetrun --start_port",
    "FLAGS_nccl_nrings": "use strategy.nccl_comm_num",
    "FLAGS_allreduce_record_one_event": "buckets overlap with backward unless "
    "strategy.sync_nccl_allreduce is set",
    "FLAGS_check_nan_inf": "use torch.autograd.set_detect_anomaly(True), and "
    "strategy.a_sync_configs.on_nonfinite for what servers do",
    "FLAGS_(benchmark|enable_rpc_profiler)": _TRACE,
    "FLAGS_(paddle_num_threads|inner_op_parallelism)": _THREADS,
    "FLAGS_use_(mkldnn|onednn)": "torch uses oneDNN automatically; see torch.backends.mkldnn",
    "FLAGS_pserver_.*": "the first pull creates a row; entries such as fleet.CountFilterEntry "
    "choose the ids that get one",
    "FLAGS_selected_(xpus|npus|accelerators|mlus)": _DEVICES,
    "CPU_NUM": "use fleetrun --worker_num for more workers, or OMP_NUM_THREADS for threads",
    "PADDLE_ELASTIC_TIMEOUT": f"{_DEADLINE}; machines join by fleetrun --nnodes MIN:MAX",
    "PADDLE_ELASTIC_.*": _ELASTIC,
    "PADDLE_(WITH_GLOO|GLOO_.*)": _NO_GLOO,
    "PADDLE_MASTER": "use fleetrun --master host:port",
    "PADDLE_NNODES": "use fleetrun --nnodes",
    "PADDLE_RANK": "use fleetrun --rank",
    "PADDLE_NPROC_PER_NODE": "use fleetrun --nproc_per_node",
    "PADDLE_DEVICES": "use fleetrun --gpus",
    "PADDLE_IPS": "use fleetrun --ips",
    "PADDLE_START_PORT": "use fleetrun --start_port",
    "PADDLE_LOG_DIR": "use fleetrun --log_dir",
    "PADDLE_JOB_ID": "fleetrun chooses the job's id",
    "PADDLE_(DISTRI|XCCL)_BACKEND": "fleet.init chooses NCCL for GPUs and Gloo for CPUs",
    "PADDLE_COORDINATOR_ENDPOINTS": "there is no coordinator; use fleetrun --server_num",
    "PADDLE_(ALL_HETER|NEXT_HETER|PREVIOUS_HETER)_TRAINER_IP_PORT_LIST": _HETER,
    "PADDLE_AUTO_PARALLEL_CONFIG": "Fleetlight trains data-parallel; torch.distributed.tensor has "
    "other layouts",
    "PSERVER_DEBUG": _LOG,
    # MindSpore
    "MS_ENABLE_RECOVERY": _RECOVERY,
    "MS_RECOVERY_PATH": "use strategy.durability_configs.folder or strategy.checkpoint",
    "MS_NODE_TIMEOUT": _DEADLINE,
    "MS_RECEIVE_MSG_TIMEOUT": _DEADLINE,
    "MS_DISABLE_HEARTBEAT": "use a long FLEET_DEADLINE_S while you debug",
    "MS_RETRY_INTERVAL_(LOWER|UPPER)": "processes meet at one store, without pauses",
    "RANK_TABLE_FILE": _DEVICES,
    # Horovod and BytePS
    "HOROVOD_FUSION_THRESHOLD": _BUCKETS,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "use strategy.use_hierarchical_allreduce",
    "HOROVOD_STALL_.*": _DEADLINE,
    "HOROVOD_TIMELINE.*": _TRACE,
    "HOROVOD_.*": _FLEETRUN,
    "BYTEPS_PARTITION_BYTES": _BUCKETS,
    "(BYTEPS|DMLC)_.*": _FLEETRUN,
    # MPI
    "(OMPI|MV2)_COMM_WORLD_SIZE": _NO_MPI,
}


def unsupported_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each unsupported variable that is set, without its value."""
    env = os.environ if env is None else env
    return [
        f"{name} is set, but Fleetlight does not read it: {_instead(name)}"
        for name in sorted(env)
        if is_unsupported(name) and env[name].strip()
    ]


def is_unsupported(name: str) -> bool:
    """True if a variable belongs to another system and has no meaning here."""
    return _instead(name) is not None


def _instead(name: str) -> str | None:
    return next((text for rule, text in UNSUPPORTED.items() if re.fullmatch(rule, name)), None)
