# SPDX-License-Identifier: Apache-2.0
"""Complete environments of each dialect."""

from __future__ import annotations

OWN = {
    "FLEET_ROLE": "worker",
    "FLEET_INDEX": "3",
    "FLEET_WORKER_NUM": "4",
    "FLEET_SERVER_NUM": "1",
    "FLEET_MASTER": "10.0.0.1:6170",
    "FLEET_WORKER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171",
    "FLEET_SERVER_ENDPOINTS": "10.0.0.1:7000",
    "FLEET_LOCAL_RANK": "1",
    "FLEET_LOCAL_SIZE": "2",
    "FLEET_NODE_RANK": "1",
    "FLEET_NODE_NUM": "2",
    "FLEET_HOST": "10.0.0.2",
    "FLEET_DEVICE": "5",
    "FLEET_RESTART": "2",
}

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

PADDLE = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170",
    "FLAGS_selected_gpus": "3",
}

PADDLE_WORKER = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:7000,10.0.0.2:7000",
    "POD_IP": "10.0.0.9",
    "PADDLE_PORT": "7000",
}

PADDLE_SERVER = {
    "TRAINING_ROLE": "PSERVER",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:7000,10.0.0.2:7000",
    "POD_IP": "10.0.0.2",
    "PADDLE_PORT": "7000",
}

MINDSPORE = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
}

SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
