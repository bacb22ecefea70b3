# SPDX-License-Identifier: Apache-2.0
"""`LoggedValues`: what `fleet.log` has been given since the last snapshot."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fleetlight.errors import ConfigError
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.snapshot import labelled

#: values of a name that wait for a snapshot; then those so far become one sum
_MAX_WAITING = 4096
#: the length of a name
_MAX_LENGTH = 64
#: how many names a job may log
MAX_NAMES = 256


class _Waiting:
    """The values of a name since the last snapshot."""

    def __init__(self, values: Sequence[Any] = (), sum_: Any = 0.0, summed: int = 0) -> None:
        """`sum_`: of `summed` values that are no longer kept; a tensor stays on its device."""
        self._values, self._sum, self._summed = list(values), sum_, summed

    def add(self, value: Any) -> None:
        """Keep a value, or its part of a sum."""
        if len(self._values) == _MAX_WAITING:
            self._sum = sum(map(_exact, self._values), self._sum)
            self._summed += len(self._values)
            self._values.clear()
        self._values.append(value)

    def copy(self) -> _Waiting:
        """The same values, while more are added here."""
        return _Waiting(self._values, self._sum, self._summed)

    def mean(self) -> float:
        """The mean of all; one NaN or infinity shows."""
        whole = sum(map(float, self._values), float(self._sum))
        return whole / (self._summed + len(self._values))


class LoggedValues:
    """Keeps values as they are: reading a tensor of a GPU would make the script wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        #: the last mean of each name
        self._last: dict[str, float] = {}
        self._names: set[str] = set()
        #: values of names beyond the limit
        self.dropped = 0

    def add(self, values: dict[str, Any]) -> None:
        """Add one value for each name."""
        kept = {_checked(name): _detached(name, value) for name, value in values.items()}
        with self._lock:
            for name, value in kept.items():
                if name not in self._names and not self._admit(name):
                    continue
                self._waiting.setdefault(name, _Waiting()).add(value)

    def _admit(self, name: str) -> bool:
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
            return True
        if not self.dropped:
            logger.warning(
                "fleet.log: got %r after %d other names; values of further names are dropped. Log "
                "under a fixed set of names",
                name,
                MAX_NAMES,
            )
        self.dropped += 1
        return False

    def take(self) -> dict[str, float]:
        """The mean of each name since the last call; without new values, the last one."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self._last.update({name: values.mean() for name, values in waiting.items()})
        return _labelled(self._last)

    def now(self) -> dict[str, float]:
        """As `take`, but the next call of it has these values as well."""
        with self._lock:
            waiting = {name: values.copy() for name, values in self._waiting.items()}
        return _labelled({**self._last, **{name: one.mean() for name, one in waiting.items()}})


def _labelled(means: dict[str, float]) -> dict[str, float]:
    return {labelled("logged", name): value for name, value in means.items()}


def _checked(name: str) -> str:
    if not name or len(name) > _MAX_LENGTH or any(c in '{}"\n\\' for c in name):
        raise ConfigError(
            f"fleet.log: got the name {name[:80]!r}, expected 1 to {_MAX_LENGTH} characters "
            "without braces, quotes and line breaks"
        )
    return name


def _detached(name: str, value: Any) -> Any:
    """A number, or a tensor of one element without its graph."""
    detach = getattr(value, "detach", None)
    if detach is not None:
        if value.numel() != 1:
            raise ConfigError(
                f"fleet.log({name}=...): got a tensor of shape {tuple(value.shape)}, expected one "
                "number; log its mean, for example"
            )
        if value.is_complex():
            raise ConfigError(
                f"fleet.log({name}=...): got a complex tensor, expected a real number; log its "
                "absolute value, for example"
            )
        # the script may change the tensor in place
        return detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"fleet.log({name}=...): got {value!r} ({type(value).__name__}), expected one number"
        ) from None


def _exact(value: Any) -> Any:
    """A value whose sum keeps its digits; not read, so that a GPU does not make the script wait."""
    return value if isinstance(value, float) else value.double()
