# SPDX-License-Identifier: Apache-2.0
"""Names of other systems, and what to write here instead."""

from __future__ import annotations

from collections.abc import Mapping

_RANK = "fleet.worker_index()"
_SIZE = "fleet.worker_num()"
_FIRST = "fleet.is_first_worker()"
_SAVE = "fleet.save_persistables(dirname), called by all workers"
_LOAD = "fleet.load_persistables(dirname), called by all workers"
_MODEL = "model = fleet.distributed_model(model)"
_OPTIMIZER = "optimizer = fleet.distributed_optimizer(optimizer)"
_SHARD = "loader = fleet.shard(loader)"
_INIT = "fleet.init(is_collective=True)"
_LEAVE = "nothing, since the end of the script is enough, or fleet.stop_worker()"
_EQUAL = "nothing: fleet.distributed_model gives every worker the values of worker 0"
_BROADCAST = (
    "torch.distributed.broadcast(tensor, 0) in a collective job, or fleet.all_gather(value)[0]; "
    "parameters and buffers of a registered model need neither"
)
_STREAM = "fleet.data.FileStream and a function that parses lines"
_MESH = "torch.distributed.device_mesh; Fleetlight trains data-parallel"
_NAMED = "(model.named_parameters(), lr)"
_CONTEXT = f"{_INIT}, and the fields of fleet.DistributedStrategy()"
_LOG = "logging.getLogger('fleetlight').setLevel(...)"

#: by name of another system: what to write instead
HINTS: Mapping[str, str] = {
    **dict.fromkeys(("get_rank", "trainer_id", "worker_id", "process_index"), _RANK),
    **dict.fromkeys(("get_world_size", "size", "num_processes"), _SIZE),
    **dict.fromkeys(("get_group_size", "device_count", "trainer_num"), _SIZE),
    **dict.fromkeys(
        ("get_local_rank", "rank_in_node", "local_process_index"), "fleet.local_rank()"
    ),
    **dict.fromkeys(("is_main_process", "is_master", "is_global_zero", "is_chief"), _FIRST),
    "is_initialized": "nothing: fleet.init called again with the same arguments changes nothing",
    "print": (
        f"if {_FIRST}: print(...); fleetrun shows the output of worker 0 and writes that of "
        "worker N to log/workerlog.N"
    ),
    **dict.fromkeys(("set_log_level", "get_logger", "logger"), _LOG),
    "barrier": "fleet.barrier_worker()",
    "wait_for_everyone": "fleet.barrier_worker()",
    "broadcast": _BROADCAST,
    "broadcast_object_list": _BROADCAST,
    **dict.fromkeys(("broadcast_parameters", "broadcast_optimizer_state", "sync_params"), _EQUAL),
    **dict.fromkeys(("allreduce", "reduce"), "fleet.all_reduce(value)"),
    **dict.fromkeys(("allgather", "gather"), "fleet.all_gather(value)"),
    **dict.fromkeys(("scatter", "all_to_all", "send", "recv"), "torch.distributed's own function"),
    **dict.fromkeys(("save", "save_checkpoint", "save_state", "save_model"), _SAVE),
    **dict.fromkeys(("save_one_table", "save_dense_params", "save_cache_model"), _SAVE),
    **dict.fromkeys(("load", "load_checkpoint", "load_state", "load_model"), _LOAD),
    "load_one_table": _LOAD,
    "export": "fleet.save_inference_model(dirname, example_inputs)",
    **dict.fromkeys(("DataParallel", "DistributedDataParallel", "DDP", "wrap"), _MODEL),
    **dict.fromkeys(("DistributedOptimizer", "CollectiveOptimizer"), _OPTIMIZER),
    "prepare": f"{_MODEL}, {_OPTIMIZER} and {_SHARD}",
    "distributed_scaler": "torch.amp.GradScaler() as it is",
    "backward": "loss.backward()",
    "minimize": f"optimizer.minimize(loss), after {_OPTIMIZER}",
    "clip_grad_norm": "fleet.clip_grad_norm_(model, max_norm)",
    "seed": "torch.manual_seed(...), and strategy.seed for tables and the order of records",
    **dict.fromkeys(("DistributedSampler", "DistributedBatchSampler", "ElasticSampler"), _SHARD),
    **dict.fromkeys(("DataLoader", "shard_dataloader", "prepare_data_loader"), _SHARD),
    **dict.fromkeys(("InMemoryDataset", "QueueDataset", "DatasetBase", "data_generator"), _STREAM),
    "get_file_shard": "fleet.util.get_file_shard(files)",
    **dict.fromkeys(("init_process_group", "init_parallel_env", "launch"), _INIT),
    **dict.fromkeys(("destroy_process_group", "shutdown", "finalize", "stop", "close"), _LEAVE),
    "start_server": "fleet.init_server() and fleet.run_server()",
    "strategy": "fleet.DistributedStrategy()",
    "Strategy": "fleet.DistributedStrategy()",
    "ExecutionStrategy": "strategy.execution_strategy, which every strategy has",
    "BuildStrategy": "strategy, whose fields choose the passes of a program",
    "Executor": "fleet.static.Executor",
    "Program": "fleet.static.Program",
    "program_guard": "fleet.static.program_guard",
    "sparse_embedding": "fleet.nn.SparseEmbedding(dim)(ids)",
    "SparseEmbedding": "fleet.nn.SparseEmbedding(dim)",
    "SparseEmbeddingBag": "fleet.nn.SparseEmbeddingBag(dim)",
    **dict.fromkeys(
        ("EmbeddingCollection", "EmbeddingBagCollection"),
        'fleet.nn.EmbeddingCollection({"user": (16, "people", "sum"), ...})',
    ),
    **{name: f"fleet.metrics.{name}" for name in ("auc", "acc", "mae", "rmse")},
    **dict.fromkeys(("Lars", "LARS", "LarsMomentumOptimizer"), f"fleet.optim.Lars{_NAMED}"),
    **dict.fromkeys(("Lamb", "LAMB", "LambOptimizer"), f"fleet.optim.Lamb{_NAMED}"),
    **dict.fromkeys(("Ftrl", "FTRL", "FtrlOptimizer"), "fleet.optim.Ftrl(params, lr)"),
    "DGCMomentumOptimizer": "torch.optim.SGD(momentum=...) and strategy.dgc",
    **dict.fromkeys(("set_auto_parallel_context", "get_auto_parallel_context"), _CONTEXT),
    "reset_auto_parallel_context": _CONTEXT,
    "ParallelMode": f"{_INIT}, which trains data-parallel",
    "set_context": f"{_INIT}, which chooses the GPU of a worker, and model.to(device)",
    "set_ps_context": "strategy.ssl for certificates, and fleetrun --server_num for servers",
    "get_hybrid_communicate_group": _MESH,
    "HybridCommunicateGroup": _MESH,
    "CommunicateTopology": _MESH,
}


def hint(name: str) -> str | None:
    """What to write in place of `fleet.<name>`; None for an unknown name."""
    instead = HINTS.get(name)
    return None if instead is None else f"use {instead}"
