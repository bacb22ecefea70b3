# SPDX-License-Identifier: Apache-2.0
"""`Secret`: the token of a job, which no text shows by accident."""

from __future__ import annotations

from fleetlight.errors import RoleError

#: what is shorter can be found by trying
MIN_CHARACTERS = 16
MAX_CHARACTERS = 1024
#: how to make a good one, for error texts
TOKEN_ADVICE = "make one with: openssl rand -hex 32"


class Secret:
    """A text that is shown as stars, wherever the object around it is printed."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself: for keys of HMAC and environments of children, never for messages."""
        return self._text

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))


def parse_token(text: str, where: str) -> Secret:
    """The token that a variable or file called `where` holds; errors do not show it."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        raise RoleError(
            f"{where} holds {len(text)} characters, expected a token of {MIN_CHARACTERS} to "
            f"{MAX_CHARACTERS}; {TOKEN_ADVICE}"
        )
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise RoleError(
            f"{where} holds characters that do not belong into a token (blanks, control "
            f"characters, or beyond ASCII); {TOKEN_ADVICE}"
        )
    return Secret(text)
