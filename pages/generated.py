# SPDX-License-Identifier: Apache-2.0
"""All generated files of docs/, by their paths."""

from __future__ import annotations

from pathlib import Path

from pages.charts import charts
from pages.commands import commands_page
from pages.settings import settings_page
from pages.variables import variables_page

DOCS = Path(__file__).resolve().parents[1] / "docs"


def generated() -> dict[str, str]:
    """The text of each generated file, by its path below docs/."""
    return {**settings_page(), **commands_page(), **variables_page(), **charts()}


def outdated(made: dict[str, str]) -> list[str]:
    """The files that are absent or differ."""
    return [
        name
        for name, text in made.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    ]
