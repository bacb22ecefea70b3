# SPDX-License-Identifier: Apache-2.0
"""Settings of Fleet and MindSpore that Fleetlight does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_PARALLEL = "Fleetlight trains data-parallel"
_SHARDED = "use torch.distributed.fsdp.fully_shard in place of fleet.distributed_model"
_STAGES = f"use torch.distributed.pipelining; {_PARALLEL}"
_SPLIT_LAYERS = f"use torch.distributed.tensor.parallel.parallelize_module; {_PARALLEL}"
_LAYOUTS = f"use torch.distributed.device_mesh and torch.distributed.tensor; {_PARALLEL}"
_FEDERATED = "use parameter servers, by fleetrun --server_num; there is no federated training"
_HETER = "all workers of a job are alike; use fleetrun --server_num and --worker_num"
_TABLES = "use the arguments of fleet.nn.SparseEmbedding: dim, entry, initializer, optimizer"
_MEMORY = "leave it out: servers keep tables in their memory; use more of them for larger tables"
_PUSHES = "leave it out: a push leaves as soon as it is ready; send_queue_size limits the queue"
_DENSE = "leave it out: each push returns the dense values"
_OPERATORS = "use fleet.static.Executor(compile='inductor'), which fuses and optimizes operators"
_RUNS = "leave it out: one run of a program is one step"
_CUDNN = "use torch.backends.cudnn.benchmark and torch.backends.cudnn.benchmark_limit"
_BUCKETS = "use strategy.fuse_grad_size_in_MB"
_SCALER = "use torch.autocast and your own torch.amp.GradScaler, which has such arguments"
_DTYPE_OF_LAYERS = "use torch.autocast(..., enabled=False) inside layers that must not use it"
_DTYPE = "use strategy.amp_configs.dtype = 'bfloat16' or 'float16'"
_CHECKPOINTS = "use strategy.recompute_configs.checkpoints, names of modules"
_MODE = "leave it out: fleet.init(is_collective=True) or fleet.init() chooses the mode"
_DEVICE = "leave it out: fleet.init chooses the GPU of a worker; move the model by model.to(device)"
_CERTIFICATES = "use strategy.ssl, a folder of certificates; fleetlight cert DIR makes one"
_PASSWORD = "use FLEET_SSL_PASSWORD_FILE or FLEET_SSL_PASSWORD"
_SHARDS = "use loader = fleet.shard(loader)"

#: {a setting of another system, as written after `strategy.`: what to use instead}
UNSUPPORTED: Mapping[str, str] = {
    # PaddlePaddle Fleet
    **dict.fromkeys(
        ("lars", "lars_configs"), "use the optimizer fleet.optim.Lars(model.named_parameters(), lr)"
    ),
    **dict.fromkeys(
        ("lamb", "lamb_configs"), "use the optimizer fleet.optim.Lamb(model.named_parameters(), lr)"
    ),
    **dict.fromkeys(("sharding", "sharding_configs"), _SHARDED),
    **dict.fromkeys(("pipeline", "pipeline_configs"), _STAGES),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_configs"), _SPLIT_LAYERS),
    **dict.fromkeys(("hybrid_configs", "hybrid_parallel_order", "auto", "semi_auto"), _LAYOUTS),
    **dict.fromkeys(("auto_search", "split_data"), _LAYOUTS),
    "asp": "use torch.nn.utils.prune to mask weights, torch.sparse.to_sparse_semi_structured for "
    "inference",
    **dict.fromkeys(
        ("qat", "qat_configs"), "use torchao.quantization.qat before fleet.distributed_model"
    ),
    "elastic": "use fleetrun --nnodes MIN:MAX --master host:port and --max_restarts",
    "heter_ccl_mode": "leave it out: fleet.init chooses NCCL for GPUs and Gloo for CPUs",
    **dict.fromkeys(("is_fl_ps_mode", "is_with_coordinator"), _FEDERATED),
    **dict.fromkeys(("use_ps_gpu", "a_sync_configs.use_ps_gpu"), _MEMORY),
    **dict.fromkeys(("fleet_desc", "fleet_desc_configs", "sparse_table_configs"), _TABLES),
    "fs_client_param": "use fleet.save_persistables(dirname) with a mounted folder",
    "trainer_desc_configs": "use fleet.progress(loader).show(...) in the training loop",
    "adam_d2sum": "use torch.optim.Adam; servers run torch's own optimizers",
    "gradient_scale_configs": "use strategy.gradient_scale = 'mean' or 'sum'",
    "last_comm_group_size_MB": _BUCKETS,
    "_fuse_grad_size_in_TFLOPS": "use strategy.fuse_grad_size_in_num",
    "fuse_grad_merge": "leave it out: strategy.gradient_merge reduces in buckets",
    "calc_comm_same_stream": "use strategy.sync_nccl_allreduce, which waits for each bucket",
    **dict.fromkeys(("build_strategy", "without_graph_optimization"), _OPERATORS),
    **dict.fromkeys(("cudnn_exhaustive_search", "conv_workspace_size_limit"), _CUDNN),
    "cudnn_batchnorm_spatial_persistent": "leave it out: cuDNN chooses the mode of batch norm",
    "save_to_prototxt": "use strategy.to_file(path), which writes TOML",
    "load_from_prototxt": "use fleet.DistributedStrategy.from_file(path), which reads TOML",
    "a_sync_configs.max_merge_var_num": "use strategy.a_sync_configs.max_merge",
    "a_sync_configs.independent_recv_thread": _DENSE,
    "a_sync_configs.min_send_grad_num_before_recv": _DENSE,
    **dict.fromkeys(("a_sync_configs.thread_pool_size", "a_sync_configs.send_wait_times"), _PUSHES),
    "a_sync_configs.runtime_split_send_recv": _PUSHES,
    "a_sync_configs.launch_barrier": "leave it out: workers wait for servers up to "
    "strategy.deadline_s",
    "a_sync_configs.heter_worker_device_guard": _HETER,
    "a_sync_configs.lr_decay_steps": "use a scheduler of torch.optim.lr_scheduler in the loop",
    "amp_configs.incr_every_n_steps": _SCALER,
    "amp_configs.decr_every_n_nan_or_inf": _SCALER,
    **dict.fromkeys(("amp_configs.incr_ratio", "amp_configs.decr_ratio"), _SCALER),
    "amp_configs.custom_white_list": _DTYPE_OF_LAYERS,
    "amp_configs.custom_black_list": _DTYPE_OF_LAYERS,
    "amp_configs.custom_black_varnames": _DTYPE_OF_LAYERS,
    "amp_configs.use_fp16_guard": _DTYPE_OF_LAYERS,
    **dict.fromkeys(("amp_configs.use_pure_fp16", "amp_configs.use_pure_bf16"), _DTYPE),
    "amp_configs.use_optimizer_fp16": _DTYPE,
    "recompute_configs.enable_offload": "use torch.autograd.graph.save_on_cpu around the forward",
    "recompute_configs.checkpoint_shape": _CHECKPOINTS,
    "recompute_configs.enable_tuning": _CHECKPOINTS,
    "recompute_configs.refined_ops_patterns": _CHECKPOINTS,
    "execution_strategy.num_iteration_per_run": _RUNS,
    "execution_strategy.use_thread_barrier": _RUNS,
    # Fleet of fluid's time
    "use_dgc": "use strategy.dgc",
    "use_amp": "use strategy.amp",
    "amp_loss_scaling": "use strategy.amp_configs.init_loss_scaling",
    "forward_recompute": "use strategy.recompute",
    "recompute_checkpoints": _CHECKPOINTS,
    **dict.fromkeys(("use_dist_fc", "dist_fc_config"), _SPLIT_LAYERS),
    **dict.fromkeys(("mode", "collective_mode"), _MODE),
    "sync_mode": "use strategy.a_sync = False for sync mode, True for async",
    "geo_sgd_mode": "use strategy.a_sync = True and strategy.a_sync_configs.k_steps",
    "geo_sgd_need_push_nums": "use strategy.a_sync_configs.k_steps",
    # MindSpore: set_auto_parallel_context
    "parallel_mode": "leave DATA_PARALLEL out; use torch.distributed.tensor for SEMI_AUTO_PARALLEL "
    "and AUTO_PARALLEL",
    "gradients_mean": "use strategy.gradient_scale = 'mean' or 'sum'",
    "gradient_fp32_sync": "leave it out: gradients travel as they are unless strategy.compression "
    "is set",
    "loss_repeated_mean": _LAYOUTS,
    "enable_alltoall": f"use torch.distributed.all_to_all_single; {_PARALLEL}",
    **dict.fromkeys(("enable_parallel_optimizer", "parallel_optimizer_config"), _SHARDED),
    **dict.fromkeys(
        ("optimizer_weight_shard_size", "optimizer_weight_shard_aggregated_save"), _SHARDED
    ),
    **dict.fromkeys(("all_reduce_fusion_config", "comm_fusion"), _BUCKETS),
    **dict.fromkeys(("pipeline_stages", "pipeline_config"), _STAGES),
    **dict.fromkeys(("search_mode", "auto_parallel_search_mode", "strategy_ckpt_config"), _LAYOUTS),
    **dict.fromkeys(("strategy_ckpt_load_file", "strategy_ckpt_save_file"), _LAYOUTS),
    "communi_parallel_mode": _LAYOUTS,
    **dict.fromkeys(("dataset_strategy", "full_batch"), _SHARDS),
    "grad_accumulation_step": "use strategy.gradient_merge and gradient_merge_configs.k_steps",
    "parameter_broadcast": "leave it out: fleet.distributed_model gives all workers equal values",
    "device_num": "use fleetrun --nproc_per_node or --worker_num",
    "global_rank": "leave it out: the launcher sets it; fleet.worker_index() returns it",
    # MindSpore: set_ps_context and set_context
    **dict.fromkeys(("enable_ssl", "config_file_path"), _CERTIFICATES),
    **dict.fromkeys(("client_password", "server_password"), _PASSWORD),
    "cipher_list": "leave it out: OpenSSL chooses a suite of TLS 1.3; OPENSSL_CONF may name it",
    "cert_expire_warning_time_in_day": "use strategy.ssl_configs.expiry_warning_days",
    **dict.fromkeys(("device_target", "device_id"), _DEVICE),
}


def advice_on(path: str) -> str | None:
    """What to use instead of a setting, such as `strategy.lars`; None if it is unknown."""
    return UNSUPPORTED.get(path.removeprefix("strategy."))
