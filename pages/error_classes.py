# SPDX-License-Identifier: Apache-2.0
"""The page of all errors, from their classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fleetlight import errors
from fleetlight.launch import exit_codes
from pages.docstrings import docstring_of

_ABOUT = f"""\
# Errors

Every error that Fleetlight raises on purpose is a class of `fleet.errors`. A message says what was
got, what was expected, where, and what to do next. [Troubleshooting](../troubleshooting.md) lists
messages.

A process that ends with an error has one of these exit codes:

| code | meaning |
|---|---|
| {exit_codes.PERMANENT} | permanent: the same start fails again until you change something |
| {exit_codes.PEER_FAILED} | a peer has failed, and this process only with it |
| {exit_codes.ERROR} | any other error; a restart may help |
| {exit_codes.RESUME_CODE} | no error: stopped on request, with the job saved |

## The tree"""


def errors_page() -> dict[str, str]:
    """The page by its path below docs/."""
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1]
    kinds = [getattr(errors, name) for name in errors.__all__]
    kinds.sort(key=lambda kind: tree.index(kind.__name__))
    parts = [_ABOUT, f"```text\n{tree}\n```", *(part for kind in kinds for part in _class(kind))]
    return {"reference/errors.md": "\n\n".join(parts) + "\n"}


def _class(kind: type[errors.FleetError]) -> Iterator[str]:
    doc = docstring_of(kind)
    bases = " and ".join(f"`{base.__name__}`" for base in kind.__bases__)
    yield f"## fleet.errors.{kind.__name__}"
    yield doc.text
    yield "\n".join(
        [
            f"- What to do: {doc.advice}",
            f"- Exit code: {exit_codes.of_error(kind('x'))}",
            f"- Is a {bases}",
        ]
    )
    yield f"```pycon\n{doc.example}\n```"
