# SPDX-License-Identifier: Apache-2.0
"""The options of `sbatch` that `fleetrun --option` accepts. Pure."""

from __future__ import annotations

import re
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


#: options without a value
_SWITCHES = frozenset(("contiguous", "oversubscribe", "spread-job", "use-min-nodes"))
#: options whose value may be left out
_OPTIONAL = frozenset(("exclusive", "nice", "propagate"))
_COUNT = re.compile(r"[1-9]\d*")
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)
#: the form of a value, and what to expect
_FORMS = {
    **dict.fromkeys(("time", "time-min"), (_TIME, "minutes, HH:MM:SS or DAYS-HH:MM:SS")),
    **dict.fromkeys(
        (
            *("cores-per-socket", "mincpus", "ntasks-per-node", "ntasks-per-socket"),
            *("sockets-per-node", "threads-per-core"),
        ),
        (_COUNT, "a number of at least 1"),
    ),
    "nodes": (re.compile(r"[\d,:km-]+"), "a number, or MIN-MAX"),
    "nice": (re.compile(r"[+-]?\d*"), "a number"),
    "priority": (re.compile(r"\d+|top", re.IGNORECASE), "a number, or TOP"),
}


def check_options(options: Mapping[str, str]) -> None:
    """Refuse options that are unknown, that fleetrun sets, or whose values Slurm would refuse."""
    for name, value in options.items():
        if name in _OURS:
            raise ConfigError(f"--option {name}: fleetrun sets it; {_OURS[name]}")
        if name not in _KNOWN:
            near = did_you_mean(name, _KNOWN, elsewhere="see man sbatch")
            raise ConfigError(f"--option {name}: no such option of sbatch here; {near}")
        _check_value(name, value)


def _check_value(name: str, value: str) -> None:
    got = f"--option {name}={value!r}"
    if not value.isprintable():
        raise ConfigError(f"{got}: expected one line of text")
    if name in _SWITCHES and value:
        raise ConfigError(f"{got}: expected no value: --option {name}=")
    if not value and name not in _SWITCHES | _OPTIONAL:
        raise ConfigError(f"{got}: expected a value")
    form, expected = _FORMS.get(name, (None, ""))
    if form is not None and not form.fullmatch(value):
        raise ConfigError(f"{got}: expected {expected}")
