# SPDX-License-Identifier: Apache-2.0
"""`Coder`: generates and caches the code of programs, by fetched values and parts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from fleetlight.errors import ConfigError
from fleetlight.static.coding import inductor
from fleetlight.static.coding.buckets import keep_buckets
from fleetlight.static.coding.cleanup import clean
from fleetlight.static.coding.python import function_of
from fleetlight.static.graph.feeds import Shape
from fleetlight.static.graph.form import Code, Form, RunnableProgram, drop_unused, graph_of

BACK_ENDS = ("fx", "inductor")
#: the values that a run returns, and the parts that it runs
Purpose = tuple[tuple[str, ...], tuple[str, ...]]


class Coder:
    """`fx` needs no compiler; `inductor` compiles to C++ if there is a compiler."""

    def __init__(self, compile: str = "fx") -> None:
        if compile not in BACK_ENDS:
            choices = " or ".join(map(repr, BACK_ENDS))
            raise ConfigError(f"Executor(compile={compile!r}): expected {choices}")
        self._compiles = compile == "inductor" and inductor.has_compiler()
        # weak: a rewritten form is freed with its code
        self._kept: weakref.WeakKeyDictionary[
            RunnableProgram, tuple[weakref.ref[Form], dict[Purpose, Code]]
        ] = weakref.WeakKeyDictionary()

    def __call__(
        self, program: RunnableProgram, wanted: Sequence[str], parts: Sequence[str]
    ) -> Code:
        """The code of the program's current form."""
        form, purpose = program.form, (tuple(wanted), tuple(parts))
        of, codes = self._kept.get(program, (None, {}))
        if of is None or of() is not form:
            codes = {}
            self._kept[program] = weakref.ref(form), codes
        if purpose not in codes:
            codes[purpose] = self._made(form, *purpose)
        return codes[purpose]

    def _made(self, form: Form, wanted: Sequence[str], parts: Sequence[str]) -> Code:
        graph = graph_of(form, wanted, parts)
        clean(graph)
        drop_unused(graph)
        if self._compiles:
            return inductor.Compiled(graph, shapes_of(form))
        keep_buckets(graph)
        return function_of(graph)


def shapes_of(form: Form) -> list[Shape | None]:
    """The shapes of the inputs; None for state with a fixed shape.

    Pulled rows have other sizes in each run.
    """
    state = [(None,) * s.tensor.dim() if s.kind == "pulled" else None for s in form.state]
    return [*state, *(feed.shape for feed in form.feeds)]
