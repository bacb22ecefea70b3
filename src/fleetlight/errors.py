# SPDX-License-Identifier: Apache-2.0
"""Every error Fleetlight raises on purpose.

FleetError
├── ConfigError (ValueError)         what the user wrote or set is wrong
│   ├── RoleError                    the environment does not say who this process is
│   ├── StrategyError                a strategy field: unknown name, wrong type, wrong value
│   ├── AddressError                 where this process is to listen it cannot
│   ├── ComebackError                a script that cannot go on where a life of it before was
│   └── NotAvailableError            a known setting that this version does not implement yet
├── TorchVersionError (ImportError)  this torch is too old
├── PlanError (RuntimeError)         model, optimizer and job do not fit together
│   ├── DivergedError                the workers do not take the same steps
│   └── NoProgramError (AttributeError)    fleet.main_program, before there is a program
├── PeerError (RuntimeError)         another process of the job
│   ├── DeadlineError (TimeoutError)       did not answer in time
│   ├── PeerLostError (ConnectionError)    went away
│   ├── ProtocolError                      speaks another language, or another version of ours
│   └── MembershipError                    never came, or does not belong here
│       └── StoppedError                   comes no more: the job was asked to stop
├── CheckpointError (RuntimeError)   a checkpoint could not be written or read
│   ├── CorruptCheckpointError       its bytes are not those that were written
│   └── LostCheckpointError          a process that was to write some of it has gone
├── JournalError (RuntimeError)      what a server writes down could not be written or read
├── GradientError (ArithmeticError)  a gradient is NaN or infinite
├── DataError (ValueError)           a data file or record is not what its format says
└── LaunchError (RuntimeError)       fleetrun could not start or keep the job

A message says what was got, what was expected, where, and what to do next.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
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
    "NoProgramError",
    "NotAvailableError",
    "PeerError",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "RoleError",
    "StoppedError",
    "StrategyError",
    "TorchVersionError",
]

P = ParamSpec("P")
R = TypeVar("R")


class FleetError(Exception):
    """Base of all errors of Fleetlight."""


class ConfigError(FleetError, ValueError):
    """Something the user wrote or set is wrong."""


class RoleError(ConfigError):
    """The environment does not say who this process is, or says it twice."""


class StrategyError(ConfigError):
    """A strategy field has an unknown name, a wrong type or a wrong value."""


class AddressError(ConfigError):
    """The address to listen at is not of this machine, or its port is taken; another may do."""


class ComebackError(ConfigError):
    """A process was started again alone, and cannot go on where it was: only all can begin anew."""


class NotAvailableError(ConfigError):
    """A known setting that this version does not implement yet."""


class TorchVersionError(FleetError, ImportError):
    """The installed torch is older than the oldest that Fleetlight supports."""


class PlanError(FleetError, RuntimeError):
    """Model, optimizer and job do not fit together."""


class DivergedError(PlanError):
    """The workers no longer take the same steps on the same model."""


class NoProgramError(PlanError, AttributeError):
    """There is no `fleet.main_program` yet; `hasattr` says so too."""


class PeerError(FleetError, RuntimeError):
    """Another process of the job is the cause; this one only noticed it."""


class DeadlineError(PeerError, TimeoutError):
    """A peer did not answer within the deadline."""


class PeerLostError(PeerError, ConnectionError):
    """A peer went away without saying goodbye."""


class ProtocolError(PeerError):
    """What came over a connection is not what Fleetlight of this version says."""


class MembershipError(PeerError):
    """The job could not be formed: somebody is missing or does not fit."""


class StoppedError(MembershipError):
    """A worker that is waited for comes no more: the job was asked to stop."""


class CheckpointError(FleetError, RuntimeError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class LostCheckpointError(CheckpointError):
    """A process that was to write some of a checkpoint has gone; the one before is there still."""


class JournalError(FleetError, RuntimeError):
    """What a server writes down before it acknowledges it could not be written, or read back."""


class GradientError(FleetError, ArithmeticError):
    """A gradient holds values that are not finite."""


class DataError(FleetError, ValueError):
    """A data file or record is not what its format says."""


class LaunchError(FleetError, RuntimeError):
    """The launcher could not start the job or keep it running."""


#: another start of the same job fails in the same way, or would do away with what it is about
_LASTING = (ConfigError, PlanError, CheckpointError, JournalError, DataError)
_PASSING = (AddressError, ComebackError, DivergedError, LostCheckpointError)


def is_lasting(error: BaseException) -> bool:
    """Whether starting all processes again would not help: somebody has to mend something first."""
    return isinstance(error, _LASTING) and not isinstance(error, _PASSING)


#: more names than that are not a help on one line
_MANY = 20


def did_you_mean(
    name: str, known: Iterable[str], told: Iterable[str] | None = None, *, elsewhere: str = ""
) -> str:
    """A sentence listing the names nearest to `name`, or all (or those `told`) when none is.

    `elsewhere` says where all of them are, in place of a long list.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    if elsewhere and len(names) > _MANY:
        return f"none of the {len(names)} known names is near; {elsewhere}"
    return "known names: " + ", ".join(names if told is None else told)


def counted(number: int, noun: str, separator: str = "") -> str:
    """`1 worker`, `2 workers`; with a separator `2,374 workers`."""
    return f"{number:{separator}} {noun}{'' if number == 1 else 's'}"


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; a misspelled keyword argument raises a TypeError with the near names."""
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
