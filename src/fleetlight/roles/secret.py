# SPDX-License-Identifier: Apache-2.0
"""`Secret`: a text that is never printed by accident, such as the token of a job."""

from __future__ import annotations

from fleetlight.errors import RoleError

#: shorter tokens are open to brute force
MIN_CHARACTERS = 16
MAX_CHARACTERS = 1024
#: advice in error texts
TOKEN_ADVICE = "make one with: openssl rand -hex 32"


class Secret:
    """A text whose `str` and `repr` are stars."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text, for HMAC keys and environments of children, not for messages."""
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
    """Check a token from the variable or file `where`; errors do not show it."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        raise RoleError(
            f"{where} has {len(text)} characters, expected a token of {MIN_CHARACTERS} to "
            f"{MAX_CHARACTERS}; {TOKEN_ADVICE}"
        )
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise RoleError(
            f"{where} has characters that a token must not have (blanks, control characters, or "
            f"non-ASCII); {TOKEN_ADVICE}"
        )
    return Secret(text)
