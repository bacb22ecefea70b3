# SPDX-License-Identifier: Apache-2.0
"""`Progress`: wraps a loader and shows how far it is, as a live bar or as plain lines."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fleetlight.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Clock = Callable[[], float]

_BAR_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 5.0
#: how many updates back the speed is measured
_SPEED_WINDOW = 30
#: columns of the bar with its blank, and of terminals that have room for it
_BAR, _WIDE = 25, 72
#: how often the staleness is asked for
_STALENESS_EVERY_S = 5.0


class Progress(Generic[T]):
    """Iterates over `iterable`; on the first worker it shows step, values, speed and ETA.

    The speed counts the samples of this loader, found in each batch: the first dimension of its
    first tensor. `samples_per_step` replaces that count, for example with the whole job's.
    `staleness` returns the mean staleness of gradients, None where there is none yet.
    """

    def __init__(
        self,
        iterable: Iterable[T],
        *,
        total: int | None = None,
        rank0: bool = True,
        samples_per_step: int | None = None,
        staleness: Callable[[], float | None] = lambda: None,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._iterable = iterable
        self._total = _length(iterable) if total is None else total
        self._rank0 = rank0
        self._samples_per_step = samples_per_step
        self._staleness = staleness
        self._console = console
        self._clock = clock
        self._values: dict[str, object] = {}

    def show(self, **values: object) -> None:
        """Values to show from now on. Cheap: a tensor is read only when its value is displayed."""
        if self._rank0:
            self._values.update({name: _one(name, value) for name, value in values.items()})

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("the wrapped iterable has no length; pass total=")
        return self._total

    def __iter__(self) -> Iterator[T]:
        return self._shown() if self._rank0 else iter(self._iterable)

    def _shown(self) -> Iterator[T]:
        self._values.clear()
        shown_at = self._clock()
        meter = _Meter(self._total, shown_at)
        staleness = _Remembered(self._staleness, self._clock)
        with contextlib.closing(_display(self._console or _stderr())) as display:
            try:
                for batch in self._iterable:
                    meter.count(self._samples_per_step or _batch_size(batch))
                    yield batch
                    if (now := self._clock()) - shown_at >= display.interval_s:
                        shown_at = now
                        display.update(meter, [*meter.parts(now, self._values), *staleness()])
            finally:  # also when the loop was left early or failed
                display.update(meter, meter.summary(self._clock(), self._values))


class _Remembered:
    """The staleness as a part of the line; asked for only every few seconds."""

    def __init__(self, ask: Callable[[], float | None], clock: Clock) -> None:
        self._ask, self._clock = ask, clock
        self._asked_at: float | None = None
        self._parts: list[str] = []

    def __call__(self) -> list[str]:
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= _STALENESS_EVERY_S:
            self._asked_at, found = now, self._ask()
            self._parts = [] if found is None else [f"staleness {found:.1f}"]
        return self._parts


class _Meter:
    """What has been done since the start, and how fast."""

    def __init__(self, total: int | None, start: float) -> None:
        self.total = total
        self.steps = 0
        self._samples: int | None = 0
        self._start = start
        self._marks = collections.deque([(start, 0, 0)], maxlen=_SPEED_WINDOW)

    def count(self, samples: int | None) -> None:
        self.steps += 1
        if self._samples is not None:  # once a batch of unknown size was seen, only steps count
            self._samples = None if samples is None else self._samples + samples

    def parts(self, now: float, values: Mapping[str, object]) -> list[str]:
        """The line while running: speed over the last updates, time left."""
        since, steps, samples = self._marks[0]
        self._marks.append((now, self.steps, self._samples or 0))
        seconds = now - since
        parts = [self._position(), *_formatted(values), self._speed(seconds, steps, samples)]
        if self.total is not None and self.steps > steps and self.steps <= self.total:
            left = (self.total - self.steps) * seconds / (self.steps - steps)
            parts.append(f"ETA {_duration(left)}")
        return [part for part in parts if part]

    def summary(self, now: float, values: Mapping[str, object]) -> list[str]:
        """The line at the end: speed over all, time taken."""
        seconds = now - self._start
        parts = [self._position(), *_formatted(values), self._speed(seconds, 0, 0)]
        return [*(part for part in parts if part), f"took {_duration(seconds)}"]

    def _position(self) -> str:
        return f"step {self.steps}" if self.total is None else f"step {self.steps}/{self.total}"

    def _speed(self, seconds: float, steps: int, samples: int) -> str:
        if seconds <= 0:
            return ""
        if not self._samples:
            return f"{_rounded((self.steps - steps) / seconds)} steps/s"
        return f"{_rounded((self._samples - samples) / seconds)} samples/s"


class _Display(Protocol):
    interval_s: float

    def update(self, meter: _Meter, parts: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """One line now and then: for log files and pipes."""

    interval_s = _LINE_INTERVAL_S

    def __init__(self, console: Console) -> None:
        self._console = console

    def update(self, meter: _Meter, parts: Sequence[str]) -> None:
        self._console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to undo."""


class _Bar:
    """One line that the training loop itself redraws.

    A drawing thread would read tensors during the loop, and not exist in forked processes.
    """

    interval_s = _BAR_INTERVAL_S

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._console, self._has_bar = console, console.width >= _WIDE
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        if self._has_bar:
            columns.insert(0, BarColumn(bar_width=_BAR - 1))
        self._bar = RichProgress(*columns, console=console, auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task("step 0")

    def update(self, meter: _Meter, parts: Sequence[str]) -> None:
        # the window may have another size now
        text = fitting(parts, self._console.width - (_BAR if self._has_bar else 0))
        self._bar.update(
            self._task, total=meter.total, completed=meter.steps, description=text, refresh=True
        )

    def close(self) -> None:
        self._bar.stop()


def fitting(parts: Sequence[str], columns: int) -> str:
    """The first parts that fit into one line; the last ones are the least important."""
    shown = list(parts)
    while len(shown) > 1 and len("  ".join(shown)) > columns:
        shown.pop()
    return "  ".join(shown)


def _display(console: Console) -> _Display:
    from rich.errors import LiveError

    if console.is_terminal and not console.is_dumb_terminal:
        try:
            return _Bar(console)
        except LiveError:  # inside another live display, where older versions of rich have one only
            pass
    return _Lines(console)


@functools.cache
def _stderr() -> Console:
    """One console for all: nested bars can then share the terminal."""
    from rich.console import Console

    # rich takes FORCE_COLOR for a terminal, and would draw a bar into a pipe
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def _length(iterable: Iterable[object]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:  # a stream, or a loader over one
        return None


def _batch_size(batch: object) -> int | None:
    """The first dimension of the first tensor or array in a batch."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        sizes = (_batch_size(part) for part in batch)
        return next((size for size in sizes if size is not None), None)
    return None


def _one(name: str, value: Any) -> object:
    """`value` ready to be kept: without its graph, whose memory it would hold."""
    shape = tuple(getattr(value, "shape", ()))
    if any(size != 1 for size in shape):
        raise ConfigError(
            f"show({name}=...): got a tensor of shape {shape}, expected one number; "
            f"pass its mean, for example"
        )
    return value.detach() if hasattr(value, "detach") else value


def _formatted(values: Mapping[str, object]) -> list[str]:
    return [f"{name} {_text(value)}" for name, value in values.items()]


def _text(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def _rounded(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
