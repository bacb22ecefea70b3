# SPDX-License-Identifier: Apache-2.0
"""Outputs without what differs from run to run: paths, the name of the host, numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: a number with separators, a fraction, an exponent or a unit, which depends on its size
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?: (?:ms|s|[KMG]iB)\b)?")
_WORD = re.compile(r"#|[^\s#]+")


def portable(text: str, places: Mapping[str, str]) -> str:
    """An output with the paths and the name of the host that pages show."""
    for here, shown in places.items():
        text = re.sub(rf"(?<!\w){re.escape(here)}(?!\w)", shown, text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def shape(text: str) -> list[str]:
    """The words with numbers masked, in any order, since processes print beside each other.

    Two that print at once may end up in one line.
    """
    return sorted(_WORD.findall(_NUMBER.sub("#", text)))
