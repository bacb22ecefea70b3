# SPDX-License-Identifier: Apache-2.0
"""The options of `sbatch` that `fleetrun --option` accepts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlight.errors import ConfigError, did_you_mean

#: options about where and when a job may run, and how Slurm accounts for it
_KNOWN = frozenset(
    (
        *("account", "begin", "comment", "constraint", "contiguous", "core-spec", "cpu-freq"),
        *("cores-per-socket", "deadline", "delay-boot", "dependency", "exclude", "exclusive"),
        *("gpu-freq", "gres", "hint", "licenses", "mail-type", "mail-user", "mincpus", "network"),
        *("nice", "nodelist", "nodes", "ntasks-per-node", "ntasks-per-socket", "oversubscribe"),
        *("partition", "power", "prefer", "priority", "profile", "propagate", "qos"),
        *("reservation", "sockets-per-node", "spread-job", "switches", "thread-spec"),
        *("threads-per-core", "time", "time-min", "tmp", "use-min-nodes", "wait-all-nodes"),
        "wckey",
    )
)

#: options that follow from flags of fleetrun
_OURS = {
    "array": "start fleetrun once for each job",
    "chdir": "start fleetrun in that folder",
    "cpus-per-task": "use --worker_cpus and --server_cpus",
    "distribution": "servers are the first tasks of each node",
    "error": "use --log_dir",
    "export": "use --env",
    "gpus": "use --gpus",
    "gpus-per-task": "use --gpus",
    "job-name": "use --name",
    "kill-on-bad-exit": "the other processes name the one that failed",
    "mem": "use --worker_memory and --server_memory",
    "mem-per-cpu": "use --worker_memory and --server_memory",
    "no-requeue": "fleetlight stop ends a job for good",
    "ntasks": "use --server_num and --worker_num",
    "open-mode": "logs continue after a restart",
    "output": "use --log_dir",
    "requeue": "all jobs are started again after the loss of a node",
    "signal": "use --grace_s",
}


def check_options(options: Mapping[str, str]) -> None:
    """Refuse options that are unknown, that fleetrun sets, or that would leave their line."""
    for name, value in options.items():
        if name in _OURS:
            raise ConfigError(f"--option {name}: fleetrun sets it; {_OURS[name]}")
        if name not in _KNOWN:
            raise ConfigError(
                f"--option {name}: no such option of sbatch here; {did_you_mean(name, _KNOWN)}"
            )
        if not value.isprintable():
            raise ConfigError(f"--option {name}={value!r}: expected one line of text")
