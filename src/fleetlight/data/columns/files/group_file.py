# SPDX-License-Identifier: Apache-2.0
"""`GroupFile`: a file of which Arrow reads some records at a time."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.data.locations.files import FoundFile, LocalFile
from fleetlight.errors import DataError

#: the smallest and the largest value of each column with statistics, and whether some are missing
Bounds = dict[str, tuple[Any, Any, bool]]


@dataclasses.dataclass(frozen=True)
class GroupFile(abc.ABC):
    """What is known of a file before its records are read."""

    source: FoundFile
    #: pyarrow.Schema
    schema: Any
    #: records of each group
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.source.name

    def place(self, group: int) -> str:
        """Where a group is, in errors."""
        return f"{self.name}, {self.group_name} {group}"

    @property
    @abc.abstractmethod
    def group_name(self) -> str:
        """What a group is called."""

    @abc.abstractmethod
    def read(self, group: int, columns: Sequence[str]) -> Any:
        """The table of a group, with these columns."""

    def bounds(self, group: int, columns: Sequence[str]) -> Bounds:
        """What the file says about columns of a group without reading them."""
        return {}

    def advice(self, error: BaseException) -> str:
        """What to do about an error of Arrow."""
        return "write the file again"

    @contextmanager
    def reading(self, group: int) -> Iterator[None]:
        """Errors inside say which group is damaged."""
        pa = arrow()
        try:
            self.source.check_unchanged()
            yield
        except (pa.ArrowException, OSError, EOFError) as error:
            raise DataError(
                f"{self.place(group)}: cannot be read ({first_line(error)}); {self.advice(error)}"
            ) from error


@contextmanager
def opening(source: FoundFile, format_name: str) -> Iterator[None]:
    """Errors inside say which file is not of the format."""
    pa = arrow()
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(
            f"{source.name}: cannot be read as {format_name} ({first_line(error)})"
        ) from error


def arrow_input(source: FoundFile) -> Any:
    """A file as Arrow reads it."""
    if isinstance(source, LocalFile):
        return arrow().OSFile(source.name, "rb")
    return arrow().PythonFile(source.open(), mode="r")


def first_line(error: BaseException) -> str:
    """The beginning of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
