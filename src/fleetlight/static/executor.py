# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs programs by the names of their feeds and fetches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.checkpoint import InferenceModel
from fleetlight.data.read_ahead import ReadAhead
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.errors import ConfigError, names_arguments
from fleetlight.observe.log import logger
from fleetlight.static.coding.coder import Coder
from fleetlight.static.definition import default_main_program, leave_writing
from fleetlight.static.graph.feeds import Feed, accept, in_order
from fleetlight.static.graph.form import Form, changed_feeds, needed_feeds
from fleetlight.static.loaders import BoundLoader, bind, end_of, feeds_of, missing_feed
from fleetlight.static.program import Program
from fleetlight.static.running.devices import place_of
from fleetlight.static.running.options import RunOptions, Threads

#: runs up to so many batches; returns how many, and the named values of the last one
Run = Callable[[Program, ReadAhead[Any], Sequence[str], int], tuple[int, list[Tensor]]]


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """The number of steps, and the last fetched values."""

    steps: int
    #: values of the last run that computed them
    fetched: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Fetches:
    """Values computed in the first run and in every `period`-th one, and their log names."""

    names: tuple[str, ...]
    called: Sequence[str] | None
    period: int

    def __post_init__(self) -> None:
        if not isinstance(self.period, int) or self.period < 1:
            raise ConfigError(f"print_period: got {self.period!r}, expected a number of runs")
        if self.called is not None and len(self.called) != len(self.names):
            raise ConfigError(
                f"fetch_info: got {len(self.called)} names, expected one for each of the "
                f"{len(self.names)} in fetch_list"
            )

    def until_next(self, step: int) -> int:
        """How many runs after run number `step` compute values next; the first run is 1."""
        return 1 if step == 0 else self.period - step % self.period

    def described(self, values: Sequence[Tensor]) -> str:
        """Names and values, for the log."""
        names = self.called or self.names
        return ", ".join(f"{n} {_shown(v)}" for n, v in zip(names, values, strict=True))


#: Fleet's arguments without effect here, and why
_EXPLAINED = {
    "scope": "values are in the model and the optimizer, so there is no scope to choose",
    "thread": "a worker runs its batches one after another; start more workers "
    "(fleetrun --nproc_per_node or --worker_num) for more at once",
    "debug": "there is no per-operator timing; use torch.profiler around the call, and "
    "fleet.account() for the time spent waiting",
}


def explain_arguments(verb: str, **given: object) -> None:
    """Log a line for each argument that is set and has no effect."""
    for name, value in given.items():
        if value:
            logger.info("%s: %s=%r has no effect: %s", verb, name, value, _EXPLAINED[name])


def train_on(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """Make a step for each batch."""
    return _run(run, program, _bound(dataset, program), fetches, "train")


def infer_on(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """Run an evaluation for each batch."""
    if program.form.trains:
        raise ConfigError(
            "infer_from_dataset: got a program that trains; give program.clone(for_test=True)"
        )
    return _run(run, program, _bound(dataset, program), fetches, "infer")


def _run(
    run: Run, program: Program, loader: BoundLoader, fetches: Fetches, verb: str
) -> DatasetResult:
    batches, step, fetched = ReadAhead(iter(loader)), 0, list[Tensor]()
    while True:
        count = fetches.until_next(step)
        made, values = run(program, batches, fetches.names, count)
        step += made
        if made < count:
            break
        if fetches.names:
            fetched = values
            logger.info("%s: step %d, %s", verb, step, fetches.described(values))
    logger.info("%s: %d steps", verb, step)
    return DatasetResult(step, fetched)


def _bound(dataset: Any, program: Program) -> BoundLoader:
    if isinstance(dataset, BoundLoader):
        return dataset
    if isinstance(dataset, FileStream):
        raise ConfigError(
            "a FileStream gives lines; give its loader, stream.loader(batch_size), or "
            "fleet.shard(stream.loader(batch_size))"
        )
    if not isinstance(dataset, Iterable):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, expected a loader of batches, or a "
            "loader from static.bind"
        )
    return bind(dataset, None, program)


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else str(value.tolist())


#: state that is equal on all workers
_KEPT = ("parameter", "buffer")


class Executor:
    """Runs the code that torch.fx generates from a program; no compiler is needed.

    Each value is freed after its last use, so Paddle's `num_iteration_per_drop_scope` has no
    counterpart.

    Args:
        place: the device of feeds if the program has no state; otherwise it is that of the model.
        compile: `"fx"`, or `"inductor"` to compile the program with a C++ compiler.
        fetch_frequency: a program that trains computes fetches in every n-th run, and other runs
            return the last values; by default as in the program's strategy.
        num_threads: threads of torch's operators during a run; by default as in the strategy.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}
        >>> program = fleet.static.capture(model, nn.functional.mse_loss, optimizer, inputs)
        >>> executor = fleet.static.Executor()
        >>> feed = {"x": torch.ones(8, 4), "y": torch.ones(8, 1)}
        >>> before = executor.run(program, feed=feed, fetch_list=["loss"])[0]
        >>> executor.run(program, feed=feed, fetch_list=["loss"])[0] < before
        tensor(True)
    """

    @names_arguments
    def __init__(
        self,
        place: Any = "cpu",
        *,
        compile: str = "fx",
        fetch_frequency: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.place = place_of(place)
        self._frequency, self._threads = fetch_frequency, num_threads
        RunOptions().changed(fetch_frequency, num_threads)
        self._compile = compile
        self._coder = Coder(compile)
        self._known: weakref.WeakKeyDictionary[Program, _ProgramRuns] = weakref.WeakKeyDictionary()

    @names_arguments
    def run(
        self,
        program: Program | None = None,
        feed: Any = None,
        fetch_list: Any = (),
        return_numpy: bool = False,
        steps: int | None = None,
    ) -> list[Any]:
        """Run once and return the values of `fetch_list` (variables or their names).

        `feed`: values by name, or a list in the order of the program. Without it a started loader
        (`static.bind`) provides the next batch, or raises `static.EndOfData`. Feeds that no fetch
        and no change of the state needs may be missing: a prediction needs no label.

        `steps=n` runs up to n batches and returns the values of the last one: of the started
        loader, or of `feed`, then a list or an iterator of feeds. Fewer batches are no error; if
        none is left, it raises `static.EndOfData`. With parameter servers, batches are read one
        or two steps before they run, and must not change meanwhile.
        """
        program = _checked(default_main_program() if program is None else program)
        leave_writing(program)
        if program.starts:
            return self._start(program)
        self._check_started(program)
        wanted = _listed(program, fetch_list)
        if steps is None:
            batches = ReadAhead(iter([self._feed(program, wanted, feed)]))
        else:
            batches = feeds_of(program, feed, self._of(program).needs(wanted), steps)
        made, values = self._run(program, batches, wanted, 1 if steps is None else steps)
        if not made:
            raise end_of(program, feed)
        return [value.cpu().numpy() for value in values] if return_numpy else values

    @names_arguments
    def train_from_dataset(
        self,
        program: Program | None = None,
        dataset: Iterable[Any] | None = None,
        fetch_list: Any = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        *,
        scope: Any = None,
        thread: int = 0,
        debug: bool = False,
    ) -> DatasetResult:
        """Run each batch of the data set; log `fetch_list` every `print_period` runs.

        `scope`, `thread` and `debug` are Fleet's; if set, the log says why they have no effect.
        """
        program = _checked(default_main_program() if program is None else program)
        fetches = Fetches(tuple(_listed(program, fetch_list)), fetch_info, print_period)
        explain_arguments("train_from_dataset", scope=scope, thread=thread, debug=debug)
        leave_writing(program)
        self._check_started(program)
        return train_on(self._run, program, dataset, fetches)

    @names_arguments
    def infer_from_dataset(
        self,
        program: Program | None = None,
        dataset: Iterable[Any] | None = None,
        fetch_list: Any = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        *,
        scope: Any = None,
        thread: int = 0,
        debug: bool = False,
    ) -> DatasetResult:
        """Run an evaluation, `program.clone(for_test=True)`, for each batch of the data set."""
        program = _checked(default_main_program() if program is None else program)
        fetches = Fetches(tuple(_listed(program, fetch_list)), fetch_info, print_period)
        explain_arguments("infer_from_dataset", scope=scope, thread=thread, debug=debug)
        leave_writing(program)
        self._check_started(program)
        return infer_on(self._run, program, dataset, fetches)

    def close(self) -> None:
        """Drop the generated code; the next run generates it again."""
        self._known.clear()
        self._coder = Coder(self._compile)

    # -- inside

    def _start(self, startup: Program) -> list[Any]:
        for program in startup.starts:
            program.runner.start(program)
            program.has_started = True
        return []

    def _check_started(self, program: Program) -> None:
        startup = program.startup
        if startup is None or program.has_started or not _keeps_values(program.form):
            return
        if not any(p.has_started for p in startup.starts):
            raise ConfigError(
                "the program ran before its startup program, which sends the first values to "
                "all workers; call exe.run(startup) first"
            )

    def _feed(self, program: Program, wanted: Sequence[str], feed: Any) -> Any:
        """The feed of a single run, from its caller or from a loader."""
        needed = self._of(program).needs(wanted)
        if feed is not None or not needed:
            return {} if feed is None else feed
        if program.loader is None:
            raise missing_feed(needed)
        return program.loader.take()

    def _run(
        self, program: Program, batches: ReadAhead[Any], wanted: Sequence[str], steps: int
    ) -> tuple[int, list[Tensor]]:
        """Run up to `steps` batches; returns how many, and the values of the last one."""
        known, runner, made = self._of(program), program.runner, 0
        options = program.options.changed(self._frequency, self._threads)
        accept = functools.partial(known.accept, needed=known.needs(wanted), place=self.place)
        found: list[Tensor] = []
        with Threads(options.num_threads):
            while made < steps:
                ahead = runner.batches_ahead() if steps > 1 else 0
                upcoming = batches.peek(1 + ahead)
                # it raises the error of a batch that could not be loaded
                if next(batches, None) is None:
                    break
                coming = known.accepted(upcoming, accept)
                if ahead:
                    runner.announce(program, coming)
                made += 1
                is_last = made == steps or not batches.surely_continues
                missing = known.to_compute(wanted, options.fetch_frequency) if is_last else ()
                found = runner.run(program, self._coder, coming[0], missing)
                known.count(missing, found)
        return made, known.returned(wanted, found) if made else []

    def _of(self, program: Program) -> _ProgramRuns:
        form = program.form
        known = self._known.get(program)
        if known is None or known.form is not form:
            known = self._known[program] = _ProgramRuns(form)
        return known


@dataclasses.dataclass
class _ProgramRuns:
    """An executor's record of a program; a rewritten program gets a new one."""

    form: Form
    #: the number of runs, and the last values of fetches
    runs: int = 0
    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    #: the run that computed each of them
    computed: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.feeds: dict[str, Feed] = {feed.name: feed for feed in self.form.feeds}
        kept = [slot.tensor for slot in self.form.state if slot.kind in _KEPT]
        self.device: torch.device | None = kept[0].device if kept else None
        self.changed = changed_feeds(self.form)
        self._needed: dict[tuple[str, ...], tuple[str, ...]] = {}
        #: the batches read early, and their feeds
        self._later: list[tuple[Any, list[Tensor]]] = []

    def accept(self, given: Any, needed: Sequence[str], place: torch.device) -> list[Tensor]:
        """The feeds of a run in the order of the program."""
        feeds = accept(self.feeds, in_order(self.feeds, given), needed, self.device or place)
        if not self.changed:
            return feeds
        # a program that computes in place must not change the caller's tensors
        named = zip(self.feeds, feeds, strict=True)
        return [value.clone() if name in self.changed else value for name, value in named]

    def accepted(
        self, batches: Sequence[Any], accept: Callable[[Any], list[Tensor]]
    ) -> list[list[Tensor]]:
        """The feeds of the next run and of those after it; each batch is accepted once."""
        known, self._later = self._later, []

        def feeds_of(number: int) -> list[Tensor]:
            is_known = number < len(known) and known[number][0] is batches[number]
            return known[number][1] if is_known else accept(batches[number])

        found = [feeds_of(0)]
        # the error of a later batch is raised when it is the next one
        with contextlib.suppress(Exception):
            for number in range(1, len(batches)):
                found.append(feeds_of(number))
        self._later = list(zip(batches[1:], found[1:], strict=False))
        return found

    def returned(self, wanted: Sequence[str], found: list[Tensor]) -> list[Tensor]:
        """The values that a call returns, after a run that computed some of them."""
        return [self.values[name] for name in wanted] if self.form.trains else found

    def to_compute(self, wanted: Sequence[str], frequency: int) -> Sequence[str]:
        """The fetches that this run computes; it returns the last values of the others.

        No returned value is older than `frequency` runs.
        """
        # an evaluation computes all fetches, whatever the frequency
        if not self.form.trains or frequency == 1 or self.runs % frequency == 0:
            return wanted
        oldest = self.runs - frequency
        return [name for name in wanted if self.computed.get(name, oldest) <= oldest]

    def count(self, computed: Sequence[str], values: Sequence[Tensor]) -> None:
        """Count a run and store the values that it computed."""
        if self.form.trains:
            self.values.update(zip(computed, values, strict=True))
            self.computed.update(dict.fromkeys(computed, self.runs))
        self.runs += 1

    def needs(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The feeds that these values and all changes of the state need."""
        key = tuple(wanted)
        if key not in self._needed:
            self._needed[key] = needed_feeds(self.form, key)
        return self._needed[key]


def _keeps_values(form: Form) -> bool:
    """Whether the program has values that a startup program sends."""
    return any(slot.kind in _KEPT for slot in form.state)


def _checked(program: Any) -> Program:
    if isinstance(program, Program):
        return program
    if isinstance(program, InferenceModel):
        raise ConfigError("Executor: got an InferenceModel: call it, model(x)")
    raise ConfigError(f"Executor: got a {type(program).__name__}, expected a static.Program")


def _listed(program: Program, fetch_list: Any) -> Sequence[str]:
    """The names in a fetch list, which may be a single variable or name."""
    if fetch_list is None:
        return ()
    is_one = isinstance(fetch_list, (str, Tensor))
    return program.names_of([fetch_list] if is_one else fetch_list)
