# SPDX-License-Identifier: Apache-2.0
"""`sources_of`: the files of names, folders, patterns and numbered names such as {000..099}."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence

from fleetlight.data.locations.files import FoundFile, local_sources
from fleetlight.data.locations.stored import stored_sources
from fleetlight.errors import DataError
from fleetlight.store import is_url

#: files, folders and patterns, on this machine or under a URL
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def sources_of(paths: Paths, endings: Sequence[str]) -> list[FoundFile]:
    """The files of names, folders and patterns, each list sorted; `endings`: those in folders."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: dict[str, FoundFile] = {}
    given_as: dict[str, str] = {}
    for one in given:
        for name, files in _found(os.fspath(one), endings):
            if not files:
                wanted = " or ".join(endings)
                if os.path.isdir(name):
                    raise DataError(f"got {name}: the folder has no file that ends with {wanted}")
                where = "" if is_url(name) else f" in {os.getcwd()}"
                raise DataError(
                    f"got {name}: no such file{where}; expected a file, a pattern such as day_*/, "
                    f"or a folder with files that end with {wanted}"
                )
            for file in files:
                place = file.name if is_url(name) else os.path.abspath(file.name)
                if place in found:
                    raise DataError(
                        f"{file.name}: got the file twice, by {given_as[place]!r} and by {name!r}; "
                        "name it once, since its records would count twice"
                    )
                found[place], given_as[place] = file, name
    if not found:
        raise DataError(f"got {given}, expected at least one file")
    return [*found.values()]


def _found(name: str, endings: Sequence[str]) -> Iterator[tuple[str, list[FoundFile]]]:
    """The files of each name that a name with braces stands for."""
    if is_url(name):
        for _, some in itertools.groupby(without_braces(name), _bucket_of):
            names = list(some)
            yield from zip(names, stored_sources(names, endings), strict=True)
        return
    for one in [name] if os.path.exists(name) else without_braces(name):
        yield one, local_sources(one, endings)


def _bucket_of(url: str) -> str:
    return "/".join(url.split("/")[:3])


def without_braces(name: str) -> Iterator[str]:
    """The names of one with {000..099} or {a,b}, in turn; a shell would expand it in this way."""
    texts = _BRACES.split(name)
    choices = [_choices(text, name) for text in texts[1::2]]
    for chosen in itertools.product(*choices):
        between = itertools.chain.from_iterable(zip(chosen, texts[2::2], strict=True))
        yield texts[0] + "".join(between)


def _choices(inside: str, name: str) -> Sequence[str]:
    found = _RANGE.fullmatch(inside)
    if found is None:
        if "," not in inside:
            raise DataError(
                f"got {name}: expected two whole numbers, as in {{000..099}}, got {{{inside}}}"
            )
        return inside.split(",")
    first, last = found.groups()
    if int(first) > int(last):
        raise DataError(
            f"got {name}: {first} is larger than {last}, expected the smaller one first"
        )
    width = len(first) if first.startswith("0") else 0
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
