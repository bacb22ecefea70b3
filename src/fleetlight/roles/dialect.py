# SPDX-License-Identifier: Apache-2.0
"""`Dialect`: a family of variables that describe a role, and `Variables`, which reads them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from fleetlight.errors import RoleError
from fleetlight.roles.role import Endpoint, Role, endpoint_text, parse_endpoint

Environment = Mapping[str, str]

_NUMBER = re.compile("[0-9]{1,18}")

#: seconds; a longer time is a mistake and overflows some clocks
_MAX_S = 1e7


@dataclasses.dataclass(frozen=True)
class Variables:
    """An environment read in one dialect. An empty variable counts as absent."""

    env: Environment
    dialect: str

    def get(self, name: str) -> str | None:
        """The variable's text, None if it is absent or empty."""
        return self.env.get(name, "").strip() or None

    def any(self, *names: str) -> bool:
        """True when one of the variables is set."""
        return any(self.get(name) is not None for name in names)

    def text(self, name: str) -> str:
        """The text of a required variable."""
        value = self.get(name)
        if value is None:
            raise RoleError(f"{self.dialect}: {name} is not set, but is required")
        return value

    def number(self, name: str) -> int:
        """The number in a required variable, at least 0."""
        return self._parse(name, self.text(name))

    def number_or(self, name: str, default: int | None) -> int | None:
        """The number in a variable, at least 0, or `default` if it is absent."""
        value = self.get(name)
        return default if value is None else self._parse(name, value)

    def seconds_or(self, name: str, default: float | None) -> float | None:
        """The seconds in a variable, above 0, or `default` if it is absent."""
        value = self.get(name)
        if value is None:
            return default
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _MAX_S:
            raise RoleError(
                f"{self.dialect}: {name}={value!r}, expected seconds above 0, up to {_MAX_S:g}"
            )
        return seconds

    def endpoint(self, host_name: str, port_name: str) -> Endpoint:
        """The endpoint in two variables; an IPv6 host may have brackets."""
        host, port = self.text(host_name).strip("[]"), self.number(port_name)
        return parse_endpoint(
            endpoint_text((host, port)), f"{self.dialect}: {host_name}:{port_name}"
        )

    def first_device(self) -> int | None:
        """The GPU that a launcher of Fleet's family assigned to this process."""
        value = self.get("FLAGS_selected_gpus")
        if value is None:
            return None
        return self._parse("FLAGS_selected_gpus", value.split(",")[0])

    def _parse(self, name: str, value: str) -> int:
        if not _NUMBER.fullmatch(value):
            raise RoleError(f"{self.dialect}: {name}={value!r}, expected a whole number >= 0")
        return int(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One family of variables. Each module of `roles/dialects` has one, as `DIALECT`."""

    #: the name in errors
    name: str
    #: of two present dialects, the one with the lower number is read
    precedence: int
    #: returns the role that the variables describe
    reader: Callable[[Variables], Role]
    #: the dialect is present if one of these variables is set
    marks: tuple[str, ...] = ()
    #: replaces `marks`: returns True if the dialect is present
    detector: Callable[[Variables], bool] | None = None
    #: facts of a role for which the dialect has no variables
    unstated: tuple[str, ...] = ()
    #: True if the dialect counts only without any other
    is_fallback: bool = False
    #: pattern of the variables that fleetrun does not pass to its children
    kept_from_children: str = ""

    def is_present(self, env: Environment) -> bool:
        """True if the environment has this dialect's variables."""
        variables = Variables(env, self.name)
        return self.detector(variables) if self.detector else variables.any(*self.marks)

    def read(self, env: Environment) -> Role:
        """Read the role from the environment."""
        return self.reader(Variables(env, self.name))
