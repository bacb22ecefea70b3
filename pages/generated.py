# SPDX-License-Identifier: Apache-2.0
"""All generated files of docs/, by their paths."""

from __future__ import annotations

import functools
from pathlib import Path

from pages.charts import charts
from pages.commands import commands_page
from pages.diagrams import diagrams
from pages.error_classes import errors_page
from pages.reference import reference_pages
from pages.settings import settings_page
from pages.variables import variables_page

DOCS = Path(__file__).resolve().parents[1] / "docs"


@functools.cache
def generated() -> dict[str, str]:
    """The text of each generated file, by its path below docs/."""
    return {
        **reference_pages(),
        **settings_page(),
        **commands_page(),
        **errors_page(),
        **variables_page(),
        **diagrams(),
        **charts(),
    }


def outdated() -> list[str]:
    """The files that are absent or differ."""
    return [
        name
        for name, text in generated().items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    ]
