# SPDX-License-Identifier: Apache-2.0
"""`Profile`: what one step of a script costs on one machine, as a file can keep it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetlight.errors import ConfigError
from fleetlight.files.atomic import replace_file

#: the format of the file
FORMAT = 1
#: a larger share of other programs makes the figures doubtful
QUIET = 0.1
SYNC, ASYNC, GEO = "sync", "async", "geo"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cost of one step that grows with the number of servers."""

    fixed: float = 0.0
    per_server: float = 0.0

    def at(self, servers: int) -> float:
        """The cost with this number of servers."""
        return self.fixed + self.per_server * servers


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of one step on the connections of one lane, to all servers and from them."""

    sent: Line
    received: Line
    #: False if training waits for the replies
    overlaps: bool
    #: requests of one step to each server, one after the other
    round_trips: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one step of one worker costs."""

    mode: str
    #: examples of a step; None if the script does not read a sharded loader
    batch: float | None
    #: CPU seconds of the worker, and of all servers together
    worker_cpu_s: Line
    server_cpu_s: Line
    #: seconds of a step with one server in which neither computed
    idle_s: float
    #: standard deviation of the time of a step, as a share of it
    spread: float
    lanes: dict[str, Lane]
    #: connections of a worker to each server
    connections: int
    #: by table: rows that the probe made, and bytes of a row with its state
    rows: int
    row_bytes: float
    #: bytes of a server without rows, and of a worker
    server_bytes: float
    worker_bytes: float


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine of a measurement, as far as its figures depend on it."""

    cpu: str
    cores: int
    python: str
    torch: str
    fleetlight: str

    def differences(self, other: MachineFacts) -> list[str]:
        """How `other` differs, such as `cores 8 (here 2)`."""
        pairs = [
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        ]
        return [f"{name} {theirs} (here {ours})" for name, ours, theirs in pairs if ours != theirs]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload, and the machine that it was measured on."""

    format: int
    command: list[str]
    machine: MachineFacts
    #: the share of the machine that other programs used meanwhile
    other_programs: float
    workload: Workload


def save(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=2))


def load(path: Path) -> Profile:
    """Read a profile; ConfigError if a value that a plan needs is missing or wrong."""
    remedy = "measure it again with fleetlight plan SCRIPT --save_profile FILE"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}; {remedy}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no profile: {error}; {remedy}") from None
    if profile.format != FORMAT:
        raise ConfigError(f"{path} has format {profile.format}, expected {FORMAT}; {remedy}")
    return profile
