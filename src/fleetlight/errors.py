# SPDX-License-Identifier: Apache-2.0
"""Every error Fleetlight raises on purpose.

FleetError
├── ConfigError (ValueError)         what the user wrote or set is wrong
│   ├── RoleError                    the environment does not say who this process is
│   ├── StrategyError                a strategy field: unknown name, wrong type, wrong value
│   ├── AddressError                 this process cannot listen at its address
│   ├── ComebackError                a restarted process cannot resume at its last step
│   └── NotAvailableError            a known setting that this version does not implement yet
├── TorchVersionError (ImportError)  this torch is too old
├── PlanError (RuntimeError)         model, optimizer and job do not match
│   ├── DivergedError                the workers do not take the same steps
│   └── NoProgramError (AttributeError)    fleet.main_program, before there is a program
├── PeerError (RuntimeError)         another process of the job
│   ├── DeadlineError (TimeoutError)       did not reply in time
│   ├── PeerLostError (ConnectionError)    disconnected
│   ├── ProtocolError                      uses another protocol, or another version of ours
│   └── MembershipError                    is missing, or does not belong to the job
│       ├── StoppedError                   has stopped, since the job was asked to stop
│       └── TokenError                     has another token, or none
├── CheckpointError (RuntimeError)   a checkpoint could not be written or read
│   ├── CorruptCheckpointError       its bytes have changed since the save
│   └── LostCheckpointError          a process that wrote a part of it was lost
├── StoreError (RuntimeError)        a bucket or a folder of objects did not do what was asked
│   ├── StoreRefusedError            and will not, until you change something
│   └── MissingObjectError           there is no object of this name
├── JournalError (RuntimeError)      the log of a server could not be written or read
├── PublicationError (RuntimeError)  a publication could not be written or read
├── RowFileError (RuntimeError)      rows that are not in memory could not be written or read
├── GradientError (ArithmeticError)  a gradient is NaN or infinite
├── DataError (ValueError)           a data file or record is not what its format says
└── LaunchError (RuntimeError)       fleetrun could not start or keep the job

A message says what was got, what was expected, where, and what to do next.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

__all__ = [
    "AddressError",
    "CheckpointError",
    "ComebackError",
    "ConfigError",
    "CorruptCheckpointError",
    "DataError",
    "DeadlineError",
    "DivergedError",
    "FleetError",
    "GradientError",
    "JournalError",
    "LaunchError",
    "LostCheckpointError",
    "MembershipError",
    "MissingObjectError",
    "NoProgramError",
    "NotAvailableError",
    "PeerError",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "PublicationError",
    "RoleError",
    "RowFileError",
    "StoppedError",
    "StoreError",
    "StoreRefusedError",
    "StrategyError",
    "TokenError",
    "TorchVersionError",
]

P = ParamSpec("P")
R = TypeVar("R")


class FleetError(Exception):
    """Base of all errors of Fleetlight."""


class ConfigError(FleetError, ValueError):
    """An argument or a setting of the user is wrong."""


class RoleError(ConfigError):
    """The environment does not say who this process is, or says it twice."""


class StrategyError(ConfigError):
    """A strategy field has an unknown name, a wrong type or a wrong value."""


class AddressError(ConfigError):
    """This process cannot listen: the address is of another machine, or the port is taken."""


class ComebackError(ConfigError):
    """A process that was restarted alone cannot resume: all processes must restart."""


class NotAvailableError(ConfigError):
    """A known setting that this version does not implement yet."""


class TorchVersionError(FleetError, ImportError):
    """The installed torch is older than the oldest that Fleetlight supports."""


class PlanError(FleetError, RuntimeError):
    """Model, optimizer and job do not match."""


class DivergedError(PlanError):
    """The workers no longer take the same steps on the same model."""


class NoProgramError(PlanError, AttributeError):
    """There is no `fleet.main_program` yet; `hasattr` says so too."""


class PeerError(FleetError, RuntimeError):
    """The cause is another process of the job."""


class DeadlineError(PeerError, TimeoutError):
    """A peer did not reply within the deadline."""


class PeerLostError(PeerError, ConnectionError):
    """A peer disconnected without leaving the job."""


class ProtocolError(PeerError):
    """A peer sent bytes that are not of this version's protocol."""


class MembershipError(PeerError):
    """A process of the job is missing, or does not belong to it."""


class StoppedError(MembershipError):
    """A peer has stopped, since the job was asked to stop."""


class TokenError(MembershipError):
    """Two processes do not have the same token: one has another one, or none."""


class CheckpointError(FleetError, RuntimeError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint have changed since the save."""


class LostCheckpointError(CheckpointError):
    """A process that wrote a part of a checkpoint was lost; the previous checkpoint remains."""


class StoreError(FleetError, RuntimeError):
    """A bucket or a folder of objects did not do what was asked, until a deadline."""


class StoreRefusedError(StoreError):
    """A bucket does not exist, denies access or cannot be used until the user changes something."""


class MissingObjectError(StoreError):
    """A bucket or a folder has no object of this name."""


class JournalError(FleetError, RuntimeError):
    """The log of a server could not be written or read."""


class PublicationError(FleetError, RuntimeError):
    """A publication could not be written or read."""


class RowFileError(FleetError, RuntimeError):
    """Rows of a table that are not in memory could not be written or read."""


class GradientError(FleetError, ArithmeticError):
    """A gradient has values that are not finite."""


class DataError(FleetError, ValueError):
    """A data file or record is not what its format says."""


class LaunchError(FleetError, RuntimeError):
    """The launcher could not start the job or keep it running."""


#: after these, a restart of the job fails in the same way, or would overwrite its files
_LASTING = (
    ConfigError,
    PlanError,
    CheckpointError,
    StoreRefusedError,
    JournalError,
    RowFileError,
    DataError,
    TokenError,
)
_PASSING = (AddressError, ComebackError, DivergedError, LostCheckpointError)


def is_lasting(error: BaseException) -> bool:
    """True when a restart of all processes would not help until the user changes something."""
    return isinstance(error, _LASTING) and not isinstance(error, _PASSING)


#: advice where a wait has expired although the awaited processes may be alive
RAISE_DEADLINE = (
    "if they need longer, raise the deadline: DistributedStrategy(deadline_s=...) given to "
    "fleet.init, or FLEET_DEADLINE_S"
)

#: a longer list of names does not help on one line
_MANY = 20


def did_you_mean(
    name: str, known: Iterable[str], listed: Iterable[str] | None = None, *, elsewhere: str = ""
) -> str:
    """A sentence with the names nearest to `name`, or with all names (or `listed`) if none is near.

    `elsewhere` says where to find all names, in place of a long list.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    if elsewhere and len(names) > _MANY:
        return f"none of the {len(names)} known names is near; {elsewhere}"
    return "known names: " + ", ".join(names if listed is None else listed)


def counted(number: int, noun: str, separator: str = "") -> str:
    """`1 worker`, `2 workers`; with a separator `2,374 workers`."""
    return f"{number:{separator}} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the others: `a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: a misspelled keyword raises a TypeError with the nearest names."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    known = {one.name for one in parameters if one.kind in kinds}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            wrong = next(name for name in kwargs if name not in known)
            made = args and function.__name__ == "__init__"
            name = type(args[0]).__name__ if made else function.__qualname__
            raise TypeError(
                f"{name}() got an unexpected keyword argument {wrong!r}; "
                f"{did_you_mean(wrong, known - {'self'})}"
            )
        return function(*args, **kwargs)

    return call


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__})
