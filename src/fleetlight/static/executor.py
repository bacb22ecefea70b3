# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs programs by the names of their feeds and fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import ConfigError
from fleetlight.static import calls
from fleetlight.static.feeds import accept
from fleetlight.static.form import code_of
from fleetlight.static.program import Program, names_of
from fleetlight.static.writing import default_main_program


class Executor:
    """Runs the code that torch.fx generates from a program; no compiler is needed."""

    def __init__(self, place: str | torch.device = "cpu") -> None:
        self.place = torch.device(place)
        self._codes: dict[Any, Callable[..., list[Tensor]]] = {}

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] = (),
    ) -> list[Tensor]:
        """One step; answers what is in `fetch_list`: variables, or their names."""
        calls.unwatch()
        program = program or default_main_program()
        if program.begins:
            self._start(program)
            return []
        self._check_started(program)
        feeds = accept(program.feeds, feed or {})
        return program.runner.run(program, self._code, feeds, names_of(fetch_list))

    def _start(self, startup: Program) -> None:
        for program in startup.begins:
            program.runner.start(program)
            program.has_started = True

    def _check_started(self, program: Program) -> None:
        startup = program.startup
        if startup is None or program.has_started:
            return
        if not any(p.has_started for p in startup.begins):
            raise ConfigError(
                "the program was run before its startup program, which brings the first values to "
                "all workers; run exe.run(startup) first"
            )

    def _code(
        self, program: Program, wanted: Sequence[str], parts: Sequence[str]
    ) -> Callable[..., list[Tensor]]:
        form = program.form
        key = (id(form), tuple(wanted), tuple(parts))
        if key not in self._codes:
            self._codes[key] = code_of(form, wanted, parts)
            self._forms = getattr(self, "_forms", [])
            self._forms.append(form)
        return self._codes[key]
