# SPDX-License-Identifier: Apache-2.0
"""`Dialect`: a family of variables that say who a process is, and `Variables`, which reads them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from fleetlight.errors import RoleError
from fleetlight.roles.role import Endpoint, Role, endpoint_text, parse_endpoint

Environment = Mapping[str, str]

_NUMBER = re.compile("[0-9]{1,18}")

#: seconds; what is longer than some months is a slip, and overflows in some clock further down
_LONGEST_S = 1e7


@dataclasses.dataclass(frozen=True)
class Variables:
    """An environment seen through one dialect. An empty variable counts as absent."""

    env: Environment
    dialect: str

    def get(self, name: str) -> str | None:
        """The variable's text, or None when it is absent or empty."""
        return self.env.get(name, "").strip() or None

    def any(self, *names: str) -> bool:
        """True when one of the variables is set."""
        return any(self.get(name) is not None for name in names)

    def text(self, name: str) -> str:
        """The variable's text; its absence is an error."""
        value = self.get(name)
        if value is None:
            raise RoleError(f"{self.dialect}: {name} is not set, but the dialect needs it")
        return value

    def number(self, name: str) -> int:
        """A whole number that is not negative; its absence is an error."""
        return self._parse(name, self.text(name))

    def number_or(self, name: str, default: int | None) -> int | None:
        """A whole number that is not negative, or `default` when it is absent."""
        value = self.get(name)
        return default if value is None else self._parse(name, value)

    def seconds_or(self, name: str, default: float | None) -> float | None:
        """A positive number of seconds, or `default` when it is absent."""
        value = self.get(name)
        if value is None:
            return default
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _LONGEST_S:
            raise RoleError(
                f"{self.dialect}: {name}={value!r}, expected seconds above 0, up to {_LONGEST_S:g}"
            )
        return seconds

    def endpoint(self, host_name: str, port_name: str) -> Endpoint:
        """An address from two variables; an IPv6 host may come with or without brackets."""
        host, port = self.text(host_name).strip("[]"), self.number(port_name)
        return parse_endpoint(
            endpoint_text((host, port)), f"{self.dialect}: {host_name}:{port_name}"
        )

    def first_device(self) -> int | None:
        """The accelerator that a launcher of Fleet's family gave this process."""
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
    """One family of variables. Each module of `roles/dialects` has one as `DIALECT`."""

    #: what errors call it
    name: str
    #: of two that are present, the one with the lower number counts
    precedence: int
    #: returns the role that the variables describe
    reader: Callable[[Variables], Role]
    #: it is present where one of these is set
    marks: tuple[str, ...] = ()
    #: or, in place of marks, where this is true
    detector: Callable[[Variables], bool] | None = None
    #: facts of a role that it has no variables for: its silence contradicts no other dialect
    unstated: tuple[str, ...] = ()
    #: it counts only where no other dialect is present
    is_fallback: bool = False
    #: pattern of the variables that fleetrun keeps from its children
    kept_from_children: str = ""

    def is_present(self, env: Environment) -> bool:
        """True where the environment has this dialect's variables."""
        variables = Variables(env, self.name)
        return self.detector(variables) if self.detector else variables.any(*self.marks)

    def read(self, env: Environment) -> Role:
        """The role that the environment describes in this dialect."""
        return self.reader(Variables(env, self.name))
