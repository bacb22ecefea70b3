# SPDX-License-Identifier: Apache-2.0
"""Blocks of text that no command of a page gives, by the reason: a page and the first words."""

from __future__ import annotations

UNMARKED = {
    "several machines, or a cluster": (
        "docs/collective.md: [fleet worker 0] hierarchical",
        "docs/engines/slurm.md: fleetrun: error: Slurm refuses",
        "docs/launcher.md: fleetrun: not ready endpoints",
        "docs/launcher.md: fleetrun: node 1",
        "docs/launcher.md: fleetlight: this machine's address",
        "docs/metrics.md: [fleet worker 0] communication:",
        "docs/quickstart.md: fleetrun: this machine's address: 10.0.0.1",
        "docs/quickstart.md: fleetrun: this machine's address: 10.0.0.2",
    ),
    "a GPU": ("docs/parameter-servers.md: done: steps 480, rows found on the device",),
    "its lines depend on the moment": (
        "docs/dashboard.md: log: async",
        "docs/metrics.md: step 115/500",
    ),
    "processes that are killed, or a job that is not on the page": (
        "docs/checkpoints.md: [fleet worker 0] stop requested",
        "docs/launcher.md: Traceback",
        "docs/metrics.md: 2026-07-05",
        "docs/parameter-servers.md: [fleet worker 0] servers: 1,564 pushes",
        "docs/reliability.md: fleetrun: server 1 of 2 was killed",
        "docs/reliability.md: [fleet worker 0] resuming each worker",
        "docs/storage.md: table ads",
    ),
    "the forms of a line, one below the other": (
        "docs/collective.md: fleetrun: failed",
        "docs/launcher.md: fleetrun: done",
        "docs/metrics.md: [fleet worker 0] all_reduce",
        "docs/porting.md: fleetlight: done",
    ),
    "a message of an error, with no command": (
        "docs/checkpoints.md: the checkpoint does not match",
        "docs/collective.md: PlanError",
        "docs/data.md: train-images-idx3-ubyte",
        "docs/data.md: /data/criteo/train.txt",
        "docs/parameter-servers.md: RowFileError",
    ),
    "no output: files, commands, formulas": (
        "docs/checkpoints.md: ckpt/manifest.json",
        "docs/checkpoints.md: fleetlight export",
        "docs/engines/kubernetes.md: FROM fleetlight",
        "docs/launcher.md: openssl rand",
        "docs/serving.md: current.json",
        "docs/slow-networks.md: g = clipped",
        "docs/slow-networks.md: k = ceil",
        "docs/storage.md: fleet.save_persistables",
        "docs/storage.md: s3://bucket/run",
    ),
}
