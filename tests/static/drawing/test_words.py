# SPDX-License-Identifier: Apache-2.0
"""Texts fit into the room that there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.static.drawing.words import counted, fitted, mib, rounded, width


@given(st.text(), st.floats(0, 200), st.booleans(), st.booleans())
def test_what_is_fitted_fits(text: str, room: float, bold: bool, ends: bool) -> None:
    found = fitted(text, room, 11, bold, ends)
    assert width(found, 11, bold) <= room or not found
    if found != text:
        kept = found.removeprefix("…") if ends else found.removesuffix("…")
        assert text.endswith(kept) if ends else text.startswith(kept)


def test_what_has_room_stays() -> None:
    assert fitted("stage1.0", 100, 13, bold=True) == "stage1.0"
    assert fitted("encoder.layers.0.attention", 80, 11, ends=True).endswith("attention"[-5:])


def test_wide_letters_take_more() -> None:
    assert width("iii", 10) < width("aaa", 10) < width("WWW", 10) <= width("層層層", 10)


def test_numbers_are_short() -> None:
    assert [counted(n, "op") for n in (0, 1, 2374)] == ["0 ops", "1 op", "2,374 ops"]
    assert [rounded(n) for n in (9408, 75008, 25557032, 3 * 10**9)] == [
        *("9,408", "75 k", "25.6 M", "3 G"),
    ]
    assert [mib(n) for n in (8, 3 << 10, 26 << 20, 300 << 20)] == [
        *("8 B", "3.0 KiB", "26.0 MiB", "300 MiB"),
    ]
