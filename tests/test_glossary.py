# SPDX-License-Identifier: Apache-2.0
"""The glossary: short meanings, one of each term, every source in the list."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "glossary.md"
WORDS = 20

_terms, _sources = PAGE.read_text().split("\n## Sources\n")


def rows(table: str, cells: int) -> list[list[str]]:
    """The rows of Markdown tables below their headings."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == cells for row in found)
    return [row for row in found if row[0] not in {"term", "name"}]


TERMS = rows(_terms, 3)
SOURCES = dict(rows(_sources, 2))


def test_each_term_has_one_meaning() -> None:
    terms = [term for term, _, _ in TERMS]
    assert len(terms) == len(set(terms)) > 60


def test_meanings_are_one_short_sentence() -> None:
    long = [term for term, meaning, _ in TERMS if len(meaning.split()) > WORDS]
    assert not long
    assert not [term for term, meaning, _ in TERMS if not re.fullmatch(r"[A-Z][^.]*\.", meaning)]


def test_every_source_is_listed_and_used() -> None:
    assert {source for _, _, source in TERMS} == set(SOURCES)
