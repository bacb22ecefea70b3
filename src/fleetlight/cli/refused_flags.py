# SPDX-License-Identifier: Apache-2.0
"""Flags of other launchers that fleetrun refuses with advice."""

from __future__ import annotations

from fleetlight.errors import ConfigError

#: flags of other launchers, with what to use instead
_FOREIGN = {
    "--run_mode": "the flags decide the mode: with --server_num or --servers the job has parameter "
    "servers, else it is collective",
    "--backend": "fleet.init chooses NCCL for GPUs and Gloo for CPUs; use --gpus or "
    "--nproc_per_node",
    "--http_port": "launchers meet at --master host:port; omit the flag",
    "--gloo_port": "launchers meet at --master host:port; omit the flag",
    "--xpus": "use --gpus for NVIDIA GPUs or --nproc_per_node for CPUs",
    "--npus": "use --gpus for NVIDIA GPUs or --nproc_per_node for CPUs",
    "--heter_workers": "all workers are alike; use --workers or --worker_num",
    "--heter_worker_num": "all workers are alike; use --workers or --worker_num",
    "--heter_devices": "all workers are alike; use --gpus for all workers",
    "--coordinators": "no coordinator is needed; use --servers and --workers",
    "--coordinator_num": "no coordinator is needed; use --server_num and --worker_num",
    "--elastic_server": "no outside store is needed; use --nnodes MIN:MAX --master host:port",
    "--elastic_level": "use --nnodes MIN:MAX for a changing number of machines and "
    "--max_restarts N for restarts",
    "--np": "use --nnodes MIN:MAX for machines and --nproc_per_node for processes",
    "--job_id": "a job is identified by its --master; use one port for each job",
    "--legacy": "there is one launcher; omit the flag",
    "--master_addr": "use --master host:port",
    "--master_port": "use --master host:port",
    "--standalone": "one machine is the default; omit the flag",
    "--rdzv_endpoint": "use --master host:port",
    "--rdzv_backend": "launchers always use torch's TCPStore; omit the flag",
    "--rdzv_id": "a job is identified by its --master; use one port for each job",
}

REFUSED = frozenset(_FOREIGN)


def refusal(flag: str) -> ConfigError:
    """Why a flag is refused and what to use instead."""
    return ConfigError(f"{flag} has no meaning in fleetrun: {_FOREIGN[flag]}")
