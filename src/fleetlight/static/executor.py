# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs programs by the names of their feeds and fetches."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.checkpoint import InferenceModel
from fleetlight.errors import ConfigError, names_arguments
from fleetlight.static import datasets
from fleetlight.static.coding.coder import Coder
from fleetlight.static.definition import default_main_program, leave_writing
from fleetlight.static.graph.feeds import Feed, accept, in_order
from fleetlight.static.graph.form import Form, changed_feeds, needed_feeds
from fleetlight.static.program import Program
from fleetlight.static.running.devices import place_of
from fleetlight.static.running.options import RunOptions, Threads

#: state that is equal on all workers
_KEPT = ("parameter", "buffer")


class Executor:
    """Runs the code that torch.fx generates from a program; no compiler is needed.

    `compile="inductor"` compiles it, if there is a C++ compiler.
    `place`: the device of feeds if the program has no state; otherwise the device of its model.
    `fetch_frequency`: a program that trains computes fetches in every n-th run, and other runs
    return the last values. `num_threads`: threads of torch's operators during a run. The defaults
    of both are in the program's strategy. Each value is freed after its last use, so Paddle's
    `num_iteration_per_drop_scope` has no counterpart.
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
    ) -> list[Any]:
        """Run once and return the values of `fetch_list` (variables or their names).

        `feed`: values by name, or a list in the order of the program. Without it a started loader
        (`static.bind`) provides the next batch, or raises `static.EndOfData`. Feeds that no fetch
        and no change of the state needs may be missing: a prediction needs no label.
        """
        program = _checked(default_main_program() if program is None else program)
        leave_writing(program)
        if program.starts:
            return self._start(program)
        self._check_started(program)
        known = self._of(program)
        options = program.options.changed(self._frequency, self._threads)
        wanted = _listed(program, fetch_list)
        missing = known.to_compute(wanted, options.fetch_frequency)
        feeds = self._accepted(program, known, feed, missing)
        with Threads(options.num_threads):
            found = program.runner.run(program, self._coder, feeds, missing)
        known.count(missing, found)
        values = [known.values[name] for name in wanted] if known.form.trains else found
        return [value.cpu().numpy() for value in values] if return_numpy else list(values)

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
    ) -> datasets.DatasetResult:
        """Run each batch of the data set; log `fetch_list` every `print_period` runs.

        `scope`, `thread` and `debug` are Fleet's; if set, the log says why they have no effect.
        """
        program = _checked(default_main_program() if program is None else program)
        fetches = datasets.Fetches(tuple(_listed(program, fetch_list)), fetch_info, print_period)
        datasets.explain("train_from_dataset", scope=scope, thread=thread, debug=debug)
        return datasets.train(self.run, program, dataset, fetches)

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
    ) -> datasets.DatasetResult:
        """Run an evaluation, `program.clone(for_test=True)`, for each batch of the data set."""
        program = _checked(default_main_program() if program is None else program)
        fetches = datasets.Fetches(tuple(_listed(program, fetch_list)), fetch_info, print_period)
        datasets.explain("infer_from_dataset", scope=scope, thread=thread, debug=debug)
        return datasets.infer(self.run, program, dataset, fetches)

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

    def _accepted(
        self, program: Program, known: _ProgramRuns, feed: Any, wanted: Sequence[str]
    ) -> list[Tensor]:
        """The feeds of a run, from its caller or from a loader."""
        needed = known.needs(wanted)
        if feed is None and needed and program.loader is not None:
            feed = program.loader.take()
        elif feed is None and needed:
            raise ConfigError(
                f"feed {needed[0]!r} is missing: the run got no feed, and no loader was started "
                f"for the program; give feed={{{needed[0]!r}: ...}}, or call start() of a "
                "static.bind(loader, ...)"
            )
        given: Mapping[str, Any] = in_order(known.feeds, {} if feed is None else feed)
        feeds = accept(known.feeds, given, needed, known.device or self.place)
        if not known.changed:
            return feeds
        # a program that computes in place must not change the caller's tensors
        named = zip(known.feeds, feeds, strict=True)
        return [value.clone() if name in known.changed else value for name, value in named]

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
