# SPDX-License-Identifier: Apache-2.0
"""`LoggedValues`: what `fleet.log` has been given since the last snapshot."""

from __future__ import annotations

import threading
from typing import Any

from fleetlight.errors import ConfigError
from fleetlight.observe.figures.snapshot import labelled

#: values of a name that wait for a snapshot; then those so far become one mean
_MOST_WAITING = 4096
#: the length of a name
_LONGEST = 64


class LoggedValues:
    """Keeps values as they are: reading a tensor of a GPU would make the script wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Any]] = {}
        #: the last mean of each name
        self._last: dict[str, float] = {}

    def add(self, values: dict[str, Any]) -> None:
        """Add one value for each name."""
        kept = {_checked(name): _detached(name, value) for name, value in values.items()}
        with self._lock:
            for name, value in kept.items():
                waiting = self._waiting.setdefault(name, [])
                if len(waiting) >= _MOST_WAITING:
                    waiting[:] = [_mean(waiting)]
                waiting.append(value)

    def take(self) -> dict[str, float]:
        """The mean of each name since the last call; without new values, the last one."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self._last.update({name: _mean(values) for name, values in waiting.items()})
        return _labelled(self._last)

    def now(self) -> dict[str, float]:
        """As `take`, but the next call of it has these values, too."""
        with self._lock:
            waiting = {name: list(values) for name, values in self._waiting.items()}
        return _labelled({**self._last, **{name: _mean(v) for name, v in waiting.items()}})


def _labelled(means: dict[str, float]) -> dict[str, float]:
    return {labelled("logged", name): value for name, value in means.items()}


def _checked(name: str) -> str:
    if not name or len(name) > _LONGEST or any(c in '{}"\n\\' for c in name):
        raise ConfigError(
            f"fleet.log: got the name {name[:80]!r}, expected 1 to {_LONGEST} characters without "
            "braces, quotes and line breaks"
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
        # the script may change the tensor in place
        return detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"fleet.log({name}=...): got {value!r} ({type(value).__name__}), expected one number"
        ) from None


def _mean(values: list[Any]) -> float:
    """The mean; one NaN or infinity shows."""
    return sum(map(float, values)) / len(values)
