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

# other modules import the parts of messages from here as well
from fleetlight.wording import RAISE_DEADLINE as RAISE_DEADLINE
from fleetlight.wording import counted as counted
from fleetlight.wording import did_you_mean as did_you_mean
from fleetlight.wording import first_names as first_names
from fleetlight.wording import names_arguments as names_arguments

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


class FleetError(Exception):
    """Base of all errors of Fleetlight.

    What to do: catch it around a whole script; catch a class below it where you can react.

    Example:
        >>> try:
        ...     fleet.all_reduce("text")
        ... except fleet.errors.FleetError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


class ConfigError(FleetError, ValueError):
    """An argument or a setting of the user is wrong.

    What to do: correct what the message names. A restart fails in the same way.

    Example:
        >>> fleet.init("worker")
        Traceback (most recent call last):
        fleetlight.errors.ConfigError: fleet.init: role_maker is a str, expected a RoleMaker
    """


class RoleError(ConfigError):
    """The environment does not say who this process is, or says it twice.

    What to do: start the script by one launcher, or correct the variable that the message names.

    Example:
        >>> fleet.RoleMaker(env={"FLEET_ROLE": "manager"})
        Traceback (most recent call last):
        fleetlight.errors.RoleError: ...
    """


class StrategyError(ConfigError):
    """A strategy field has an unknown name, a wrong type or a wrong value.

    What to do: correct the field; the message has similar names, or the values that it takes.

    Example:
        >>> fleet.DistributedStrategy(a_snyc=True)
        Traceback (most recent call last):
        fleetlight.errors.StrategyError: ... did you mean 'a_sync'?...
    """


class AddressError(ConfigError):
    """This process cannot listen: the address is of another machine, or the port is taken.

    What to do: give an address of this machine, or another port. A restart may help.

    Example:
        >>> issubclass(fleet.errors.AddressError, fleet.errors.ConfigError)
        True
    """


class ComebackError(ConfigError):
    """A process that was restarted alone cannot resume: all processes must restart.

    What to do: start the whole job again; it resumes from its last checkpoint or its log.

    Example:
        >>> issubclass(fleet.errors.ComebackError, fleet.errors.ConfigError)
        True
    """


class NotAvailableError(ConfigError):
    """A known setting that this version does not implement yet.

    What to do: leave the setting out, or use what the message names instead.

    Example:
        >>> issubclass(fleet.errors.NotAvailableError, fleet.errors.ConfigError)
        True
    """


class TorchVersionError(FleetError, ImportError):
    """The installed torch is older than the oldest that Fleetlight supports.

    What to do: install a newer torch.

    Example:
        >>> issubclass(fleet.errors.TorchVersionError, ImportError)
        True
    """


class PlanError(FleetError, RuntimeError):
    """Model, optimizer and job do not match.

    What to do: change the script as the message says, such as the order of two calls.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.distributed_model("model")
        Traceback (most recent call last):
        fleetlight.errors.PlanError: distributed_model: got a str, expected a torch.nn.Module
    """


class DivergedError(PlanError):
    """The workers no longer take the same steps on the same model.

    What to do: let all workers make the same calls; the message names the first difference.

    Example:
        >>> issubclass(fleet.errors.DivergedError, fleet.errors.PlanError)
        True
    """


class NoProgramError(PlanError, AttributeError):
    """There is no `fleet.main_program` yet; `hasattr` says so too.

    What to do: call `optimizer.minimize(loss)` on the loss of a static program first.

    Example:
        >>> issubclass(fleet.errors.NoProgramError, AttributeError)
        True
    """


class PeerError(FleetError, RuntimeError):
    """The cause is another process of the job.

    What to do: look for the first failure; `fleetrun` names the process and its log.

    Example:
        >>> issubclass(fleet.errors.PeerLostError, fleet.errors.PeerError)
        True
    """


class DeadlineError(PeerError, TimeoutError):
    """A peer did not reply within the deadline.

    What to do: look at the process that the message names. If it only needs longer, raise
    `deadline_s`.

    Example:
        >>> issubclass(fleet.errors.DeadlineError, TimeoutError)
        True
    """


class PeerLostError(PeerError, ConnectionError):
    """A peer disconnected without leaving the job.

    What to do: read the log of that process; it was killed, or its host or network failed.

    Example:
        >>> issubclass(fleet.errors.PeerLostError, ConnectionError)
        True
    """


class ProtocolError(PeerError):
    """A peer sent bytes that are not of this version's protocol.

    What to do: use one version of Fleetlight everywhere, and keep other programs off the port.

    Example:
        >>> issubclass(fleet.errors.ProtocolError, fleet.errors.PeerError)
        True
    """


class MembershipError(PeerError):
    """A process of the job is missing, or does not belong to it.

    What to do: start the process that the message names once, with the index of its place.

    Example:
        >>> issubclass(fleet.errors.MembershipError, fleet.errors.PeerError)
        True
    """


class StoppedError(MembershipError):
    """A peer has stopped, since the job was asked to stop.

    What to do: nothing; start the job again with `--resume` to continue.

    Example:
        >>> issubclass(fleet.errors.StoppedError, fleet.errors.MembershipError)
        True
    """


class TokenError(MembershipError):
    """Two processes do not have the same token: one has another one, or none.

    What to do: give all processes of the job the same `FLEET_TOKEN`, or start them by one launcher.

    Example:
        >>> issubclass(fleet.errors.TokenError, fleet.errors.MembershipError)
        True
    """


class CheckpointError(FleetError, RuntimeError):
    """A checkpoint could not be written or read.

    What to do: check the path, its permissions and the disk. The previous checkpoint is whole.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> fleet.load_persistables("absent")
        Traceback (most recent call last):
        fleetlight.errors.CheckpointError: ...
    """


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint have changed since the save.

    What to do: load another checkpoint, and check the disk.

    Example:
        >>> issubclass(fleet.errors.CorruptCheckpointError, fleet.errors.CheckpointError)
        True
    """


class LostCheckpointError(CheckpointError):
    """A process that wrote a part of a checkpoint was lost; the previous checkpoint remains.

    What to do: start the job again; it resumes from the previous checkpoint.

    Example:
        >>> issubclass(fleet.errors.LostCheckpointError, fleet.errors.CheckpointError)
        True
    """


class StoreError(FleetError, RuntimeError):
    """A bucket or a folder of objects did not do what was asked, until a deadline.

    What to do: check that the store can be reached from this host.

    Example:
        >>> issubclass(fleet.errors.StoreError, RuntimeError)
        True
    """


class StoreRefusedError(StoreError):
    """A bucket does not exist, denies access or cannot be used until the user changes something.

    What to do: correct the URL or the credentials.

    Example:
        >>> issubclass(fleet.errors.StoreRefusedError, fleet.errors.StoreError)
        True
    """


class MissingObjectError(StoreError):
    """A bucket or a folder has no object of this name.

    What to do: check the URL, and that what writes the object has finished.

    Example:
        >>> from fleetlight.store import store_at
        >>> store_at("folder").get("absent")
        Traceback (most recent call last):
        fleetlight.errors.MissingObjectError: ...
    """


class JournalError(FleetError, RuntimeError):
    """The log of a server could not be written or read.

    What to do: make room or repair the disk. For a damaged log, restore the folder or load a
    checkpoint.

    Example:
        >>> issubclass(fleet.errors.JournalError, RuntimeError)
        True
    """


class PublicationError(FleetError, RuntimeError):
    """A publication could not be written or read.

    What to do: check the URL, and that one job only publishes there.

    Example:
        >>> from fleetlight.serve import Reader
        >>> Reader("nothing", wait_s=0)
        Traceback (most recent call last):
        fleetlight.errors.PublicationError: ...
    """


class RowFileError(FleetError, RuntimeError):
    """Rows of a table that are not in memory could not be written or read.

    What to do: make room or repair the disk, or name another `a_sync_configs.table_folder`.

    Example:
        >>> issubclass(fleet.errors.RowFileError, RuntimeError)
        True
    """


class GradientError(FleetError, ArithmeticError):
    """A gradient has values that are not finite.

    What to do: find the operation that makes NaN, lower the learning rate, or skip such pushes with
    `a_sync_configs={"on_nonfinite": "skip"}`.

    Example:
        >>> issubclass(fleet.errors.GradientError, ArithmeticError)
        True
    """


class DataError(FleetError, ValueError):
    """A data file or record is not what its format says.

    What to do: correct or replace the file that the message names.

    Example:
        >>> fleet.data.MNIST("absent")
        Traceback (most recent call last):
        fleetlight.errors.DataError: MNIST train: nothing found in ...
    """


class LaunchError(FleetError, RuntimeError):
    """The launcher could not start the job or keep it running.

    What to do: correct the flags or the machine that the message names; `fleetlight doctor` checks
    machines.

    Example:
        >>> issubclass(fleet.errors.LaunchError, RuntimeError)
        True
    """


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


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__})
