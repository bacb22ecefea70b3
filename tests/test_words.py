# SPDX-License-Identifier: Apache-2.0
"""The prose of the code and of its pages uses the words of the field (`tests/tidy/words.py`)."""

from __future__ import annotations

import pytest
from tests.tidy.exceptions import HOW_TO_SHRINK, excused
from tests.tidy.words import banned_words, in_text, room_names

pytestmark = pytest.mark.style


@pytest.mark.parametrize("room", room_names())
def test_no_banned_words(room: str) -> None:
    found = banned_words().get(room, [])
    allowed = excused()["words"].get(room, 0)
    listed = "\n".join(map(str, found))
    assert len(found) <= allowed, f"{listed}\n{room}: {len(found)} words, {allowed} are excused"
    assert len(found) == allowed, f"{room}: {len(found)} words, {allowed} excused. {HOW_TO_SHRINK}"


def test_every_exception_names_a_room() -> None:
    assert set(excused()["words"]) <= set(room_names()), HOW_TO_SHRINK


@pytest.mark.parametrize(
    ("said", "word", "instead"),
    [
        ("until Somebody compiles", "Somebody", "name it: the worker, each server, no process"),
        ("a check that answers whether it fits", "answers whether", "returns"),
        ("the workers meet behind the last step", "behind the last step", "after"),
        ("the workers meet behind a\nstep", None, None),
        ("two workers were waited for", "were waited for", "a subject: the worker waits for ..."),
        ('"""The same.', '"""The same.', "what it does"),
        ("the answers of the servers, nobody_knows, behind a proxy, parcelling", None, None),
    ],
)
def test_banned_words_are_found(said: str, word: str | None, instead: str | None) -> None:
    found = list(in_text(f"first line\n{said}\n", "page.md"))
    assert [(each.word, each.instead) for each in found] == ([(word, instead)] if word else [])
    assert all(each.place == "page.md:2" for each in found)
