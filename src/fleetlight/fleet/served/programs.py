# SPDX-License-Identifier: Apache-2.0
"""Static programs in a job with parameter servers: the registered optimizer makes their steps.

A program computes gradients from the rows pulled for it. The optimizer uses them as it uses those
of an eager step, in every mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.fleet.protocols import RegisteredModel
from fleetlight.fleet.served.prefetch_hints import batches_ahead
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.fleet.training.programs import options_of, remember, tell_of
from fleetlight.fleet.training.registering import has_all_of, register_model
from fleetlight.fleet.training.worker_seeds import derive_worker_seeds
from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.update import TableGradients
from fleetlight.static import passes
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.lookups import Lookup
from fleetlight.static.ops.marks import GRADIENT, laid_out
from fleetlight.static.program import Program
from fleetlight.static.running.pulling import PulledRows, RunLookups
from fleetlight.static.running.runners import Coder, RunsAlone, run_parts
from fleetlight.static.writing.recorder import Part

_GRADIENTS: tuple[Part, ...] = ("forward", "backward")


class ServerSteps(Protocol):
    """Makes the steps of an optimizer; implemented by `served.steps.ServedSteps`."""

    managed: ManagedOptimizer
    session: ServerSession

    @property
    def needs_torch(self) -> bool:
        """Whether a step must be one of torch's: it changes values here, or others learn of it."""

    def step_with(
        self, tables: dict[int, TableGradients], dense: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Make a step with these gradients, by number of the table and by parameter."""


def register(
    managed: ManagedOptimizer, program: Program, steps: ServerSteps | None = None
) -> Collection[Part]:
    """Register a program; return the parts of its training that this process writes.

    `steps` makes its steps; None in a server.
    """
    job = managed.job
    assert program.model is not None
    if not any(has_all_of(model.module, program.model) for model in job.models):
        register_model(job, program.model)
        job.models[-1].is_from_program = True
    program.runner = RefusedRunner() if steps is None else ServedRunner(steps)
    # scripts of servers use `fleet.main_program` as well
    remember(program)
    return _GRADIENTS


def distribute(managed: ManagedOptimizer, program: Program) -> None:
    """Rewrite a program according to the strategy, its lookups last."""
    assert program.model is not None
    request = passes.PassRequest(managed.job.strategy, program.model, with_servers=True)
    program.passes = passes.chosen(request)
    program.options = options_of(managed.job)


class RefusedRunner(RunsAlone):
    """The runner of programs in a server."""

    def start(self, program: Program) -> None:
        """Do nothing: the workers send the first values."""

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Raise a PlanError."""
        raise PlanError(
            "a program was run in a parameter server, where nothing trains: call "
            "fleet.init_server() and fleet.run_server() there, and run programs where "
            "fleet.is_worker() is true"
        )


class ServedRunner:
    """Makes the steps of a program with parameter servers."""

    def __init__(self, steps: ServerSteps) -> None:
        self._steps, self._session, self._job = steps, steps.session, steps.managed.job
        self._known: _FormGradients | None = None
        #: the feeds and lookups of the current run, and of those after it that are known
        self._coming: list[tuple[Sequence[Tensor], RunLookups]] = []

    def start(self, program: Program) -> None:
        """`fleet.init_worker()` or the first run sends the first values."""

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Pull rows, compute gradients, and let the optimizer make a step."""
        job = self._job
        for model in job.models:
            model.freeze()
        derive_worker_seeds(job)
        tell_of(program, job)
        known = self._of(program)
        arrived = self._lookups(known.form, feeds).pull(insert=True)
        known.set_weights()
        found = run_parts(program, coder, feeds, [*wanted, *known.marks], _GRADIENTS)
        gradients = found[len(wanted) :]
        if self._steps.needs_torch:
            self._step(known, gradients, arrived)
        else:
            self._steps.step_with(
                known.table_gradients(gradients, arrived), known.dense_gradients(gradients)
            )
        return found[: len(wanted)]

    def batches_ahead(self) -> int:
        """As many as the rows that a push requests; none beside a loader that announces."""
        if not self._session.is_open or self._job.reads_shards:
            return 0
        return batches_ahead(self._job)

    def announce(self, program: Program, batches: Sequence[Sequence[Tensor]]) -> None:
        """Announce the ids of the runs after the next one, whose rows come with its push."""
        form = program.form
        known = {id(feeds): one for feeds, one in self._coming[1:] if one.form is form}
        self._coming = [(b, known.get(id(b)) or RunLookups(form, b)) for b in batches]
        self._session.communicator.announce([one.announced for _, one in self._coming[1:]])

    def _lookups(self, form: Form, feeds: Sequence[Tensor]) -> RunLookups:
        """The lookups of a run, made before it if it was announced."""
        if self._coming:
            announced, lookups = self._coming[0]
            if announced is feeds and lookups.form is form and lookups.are_final:
                return lookups
            if announced is not feeds:
                # other batches come first
                self._coming.clear()
                if not self._job.reads_shards:
                    self._session.communicator.announce([])
        return RunLookups(form, feeds)

    def _of(self, program: Program) -> _FormGradients:
        form = program.form
        if self._known is None or self._known.form is not form:
            self._known = _FormGradients(form, self._model_of(program), self._steps)
        return self._known

    def _model_of(self, program: Program) -> RegisteredModel:
        assert program.model is not None
        for model in self._job.models:
            if has_all_of(model.module, program.model):
                return model
        raise AssertionError("`register` has registered the model of the program")

    def _step(
        self, known: _FormGradients, found: Sequence[Tensor], arrived: Sequence[PulledRows]
    ) -> None:
        """Step with these gradients only, and restore the earlier ones afterwards."""
        before = [parameter.grad for parameter in known.trained]
        for parameter in known.trained:
            parameter.grad = None
        try:
            known.set_gradients(found, arrived)
            self._reduce()
            self._steps.managed.optimizer.step()
        finally:
            for parameter, gradient in zip(known.trained, before, strict=True):
                parameter.grad = gradient

    def _reduce(self) -> None:
        """Reduce dense gradients among workers, where they do so: no backward hook has."""
        if self._steps.managed.merge is not None:
            # the merge reduces the sum
            return
        for model in self._job.models:
            if model.replica is not None:
                model.replica.mark_unreduced()
                model.replica.ensure_reduced(expected=True)


class _FormGradients:
    """The parameters and tables whose gradients a form computes."""

    def __init__(self, form: Form, model: RegisteredModel, steps: ServerSteps) -> None:
        self.form = form
        self.trained = [
            p for group in steps.managed.optimizer.param_groups for p in group["params"]
        ]
        self._model = model
        self._weights = [slot for slot in form.state if slot.kind == "weight"]
        split = form.split
        pushes = {} if split is None else split.pushes
        marks = {n.name: n.args[1] for n in form.graph.nodes if n.target is GRADIENT}
        by_name = {
            slot.name: slot.tensor for slot in form.state if isinstance(slot.tensor, nn.Parameter)
        }
        dense = [mark for mark in marks if mark not in pushes.values()]
        self._dense = [by_name[str(marks[mark])] for mark in dense]
        pulls = () if split is None else split.pulls
        trained = [(n, one) for n, one in enumerate(pulls) if one.table in pushes]
        self._tables = [(n, _weight_of(form.lookups[p.wanted[0].number])) for n, p in trained]
        #: names of the nodes with gradients, those of tables last
        self.marks = [*dense, *(pushes[one.table] for _, one in trained)]

    def set_weights(self) -> None:
        """Set the weight of the current batch, which may be short or repeat a record."""
        for slot in self._weights:
            slot.tensor.fill_(self._model.weight)

    def set_gradients(self, found: Sequence[Tensor], arrived: Sequence[PulledRows]) -> None:
        """Set the gradients of parameters and tables."""
        seen: set[int] = set()
        for parameter, gradient in self.dense_gradients(found).items():
            if gradient.data_ptr() in seen:
                # two parameters must not share a gradient
                gradient = gradient.clone()
            seen.add(gradient.data_ptr())
            parameter.grad = gradient
        for number, weight, summed in self._row_gradients(found):
            weight.grad = TableGradient(weight, [arrived[number].gradients(summed)])

    def dense_gradients(self, found: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """The gradient of each parameter, laid out as the parameter is."""
        pairs = zip(self._dense, found, strict=False)
        return {parameter: laid_out(gradient, parameter) for parameter, gradient in pairs}

    def table_gradients(
        self, found: Sequence[Tensor], arrived: Sequence[PulledRows]
    ) -> dict[int, TableGradients]:
        """The gradients of each table that has rows in this run, by its number."""
        rows = ((arrived[number], summed) for number, _, summed in self._row_gradients(found))
        parts = {pulled.table: pulled.gradients(summed) for pulled, summed in rows}
        return {table: part for table, part in parts.items() if len(part.ids)}

    def _row_gradients(self, found: Sequence[Tensor]) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Of each trained table: the number of its pull, its weight, the gradient of its rows."""
        for (number, weight), summed in zip(self._tables, found[len(self._dense) :], strict=True):
            yield number, weight, summed


def _weight_of(lookup: Lookup) -> nn.Parameter:
    weight = lookup.layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight
