# SPDX-License-Identifier: Apache-2.0
"""`Reading`: runs evaluations of programs with tables. Nothing is inserted, nobody learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fleetlight.static.passes.split_ps import SplitPS
from fleetlight.static.running.pulling import pull
from fleetlight.static.running.runners import Coder, run_parts

if TYPE_CHECKING:
    from fleetlight.static.graph.form import Form
    from fleetlight.static.program import Program


class Reading:
    """One worker by itself, with the rows that tables have now."""

    def start(self, program: Program) -> None:
        """The values are there, or will be."""

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Pull and compute."""
        pull(program.form, feeds, insert=False)
        return run_parts(program, coder, feeds, wanted, ("forward",))


def read_tables(form: Form) -> Form:
    """The form of an evaluation with the rows of its lookups as inputs."""
    return form if form.split is not None or not form.lookups else SplitPS()(form)
