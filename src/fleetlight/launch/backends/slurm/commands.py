# SPDX-License-Identifier: Apache-2.0
"""Slurm's commands, whose refusals become one line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from fleetlight.errors import ConfigError, LaunchError

_LIMIT_S = 120.0
#: what commands say on a machine without a configuration of Slurm
_NO_CLUSTER = "Could not establish a configuration source"
#: what commands put before their messages, such as `sbatch: error: `
_PREFIX = re.compile(r"^(\w+: )?((error|fatal): )?(Batch job submission failed: )?")
#: `Key=value` of scontrol, where values may have spaces
_KEY = re.compile(r"(?:^|\s)([A-Z][\w/:.]*)=")


def ask(*words: str, given: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; ConfigError with its message if it refuses."""
    try:
        done = subprocess.run(
            words,
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} not found: run this on a login node of the cluster, or install Slurm's "
            "commands here; fleetrun --print shows the batch script without them"
        ) from None
    except subprocess.TimeoutExpired as error:
        # a command that tries again, such as sbatch while the queue is full, says so
        said = one_line(
            (error.stderr or b"").decode(errors="replace"), otherwise="see scontrol ping"
        )
        raise LaunchError(f"{words[0]} did not reply within {_LIMIT_S:g} s: {said}") from None
    if done.returncode:
        raise ConfigError(refusal(words, one_line(done.stderr)))
    return done.stdout


def refusal(words: Sequence[str], why: str) -> str:
    """Why a command of Slurm refuses."""
    if _NO_CLUSTER in why:
        return (
            f"{words[0]} finds no Slurm cluster: this machine belongs to none; run this on a login "
            "node of the cluster"
        )
    return f"Slurm refuses {' '.join(words[:2])}: {why}"


def one_line(text: str, otherwise: str = "it gave no reason") -> str:
    """The messages of a command as one line, each once; `otherwise` if there are none."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or otherwise


def facts_of_job(job_id: str) -> dict[str, str]:
    """What `scontrol` knows of a job."""
    text = ask("scontrol", "--oneliner", "show", "job", job_id)
    parts = _KEY.split(text.strip())[1:]
    return {key: value.strip() for key, value in zip(parts[::2], parts[1::2], strict=True)}
