# SPDX-License-Identifier: Apache-2.0
"""The job file of `fleetrun --job`: the values of flags, in TOML.

A key at the top has the name of its flag. Sections have what belongs to a role, the variables of
the processes, and the options of each engine. Each value goes through the reader of its flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fleetlight.cli import flag_values
from fleetlight.errors import ConfigError, StrategyError, did_you_mean
from fleetlight.launch import backends
from fleetlight.launch.job.options import LaunchOptions

#: the workers of a job: --worker_num if it has servers, else --nproc_per_node
_WORKERS = "workers of the job"
_WORKER_FLAGS = ("nproc_per_node", "worker_num")
#: what makes a job one with servers
_SERVER_FLAGS = ("server_num", "servers", "workers")

#: the keys of the sections of roles, and the options that they stand for
_ROLES = {
    "worker": {
        "count": _WORKERS,
        "cpus": "worker_cpus",
        "memory": "worker_memory",
        "gpus": "gpus",
    },
    "server": {"count": "server_num", "cpus": "server_cpus", "memory": "server_memory"},
}
_ENVIRONMENT = "environment"

#: options that are no key at the top, and where they are
_ELSEWHERE = {
    **{option: f"[{role}] {key}" for role, keys in _ROLES.items() for key, option in keys.items()},
    **dict.fromkeys(_WORKER_FLAGS, "[worker] count"),
    "env": f"a section [{_ENVIRONMENT}]",
    "option": "a section of the engine, such as [slurm]",
}
#: flags that do not describe a job
_NO_KEYS = ("job", "print")

#: what a reader of a flag accepts in a file, and its description; None: text
_FORMS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    None: ((str,), "text in quotes"),
    flag_values.positive: ((int,), "a whole number"),
    flag_values.count: ((int,), "a whole number"),
    flag_values.days: ((int,), "a whole number"),
    flag_values.port: ((int,), "a whole number"),
    flag_values.count_or_auto: ((int, str), 'a whole number, or "auto"'),
    flag_values.machine_range: ((int, str), 'a whole number, or a range like "2:4"'),
    flag_values.seconds: ((int, float), "a number of seconds"),
    flag_values.memory: ((str,), 'a size like "4G"'),
    flag_values.endpoint: ((str,), 'an address like "10.0.0.1:6170"'),
    flag_values.words: ((str,), 'a list of texts like ["a", "b"]'),
    flag_values.indices: ((int,), "a list of whole numbers like [0, 1]"),
}
_LISTS = (flag_values.words, flag_values.indices)
_SCALARS = (str, int, float, bool)
#: what TOML calls a value of another type
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_KINDS |= {list: "a list", dict: "a section"}


@dataclasses.dataclass(frozen=True)
class JobFile:
    """What a job file says, as values of flags."""

    path: str
    #: by the name of the option
    values: Mapping[str, Any]
    #: the key of each value, with its section
    keys: Mapping[str, str]
    #: the variables of the processes
    variables: Mapping[str, str]
    #: the options of each engine
    engines: Mapping[str, Mapping[str, str]]

    def overridden_by(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values, where those of the command line replace those of the file."""
        own = {name: value for name, value in self.values.items() if name not in given}
        if "script" in given:
            own.pop("module", None)
        places = {f"--{name}": self.keys[name] for name in own if name in self.keys}
        self._name_workers(own, given, places)
        merged = {**own, **given}
        engine = str(merged.get("on"))
        pairs = {
            "option": (engine, self.engines.get(engine, {})),
            "env": (_ENVIRONMENT, self.variables),
        }
        for flag, (section, values) in pairs.items():
            more = given.get(flag, ())
            merged[flag] = [*values.items(), *more]
            names = values.keys() - dict(more).keys()
            places |= {f"--{flag} {name}": f"[{section}] {name}" for name in names}
        if "script" in own:
            places |= {f"{kind} {own['script']!r}": "script" for kind in ("script", "module")}
        return {**merged, "places": {what: f"{self.path}: {key}" for what, key in places.items()}}

    def _name_workers(
        self, own: dict[str, Any], given: Mapping[str, Any], places: dict[str, str]
    ) -> None:
        """Replace the number of workers by the flag that it stands for in this job."""
        places.pop(f"--{_WORKERS}", None)
        count = own.pop(_WORKERS, None)
        if count is None or given.keys() & set(_WORKER_FLAGS):
            return
        has_servers = (own.keys() | given.keys()) & set(_SERVER_FLAGS)
        name = "worker_num" if has_servers else "nproc_per_node"
        if not count and not has_servers:
            raise ConfigError(
                f"{self.path}: {self.keys[_WORKERS]}: got 0, expected a number of at least 1 in a "
                "job without servers"
            )
        own[name] = count
        places[f"--{name}"] = self.keys[_WORKERS]


def read_job_file(path: str, flags: Mapping[str, argparse.Action]) -> JobFile:
    """Read and check a job file; `flags` are those of `fleetrun`, by the name of their option."""
    return _Reader(path, flags).read()


def with_places(error: ConfigError, options: LaunchOptions) -> str:
    """The text of an error, with the keys of the job file that it is about."""
    text = str(error)
    found = [
        place
        for what, place in options.places.items()
        if re.search(rf"(?<![\w-]){re.escape(what)}(?![\w-])", text)
    ]
    return f"{text} ({'; '.join(dict.fromkeys(found))})" if found else text


class _Reader:
    """Reads one file."""

    def __init__(self, path: str, flags: Mapping[str, argparse.Action]) -> None:
        self._path = path
        #: the flag of the number of workers is known once all values are
        self._flags = {**flags, _WORKERS: flags["worker_num"]}
        self._engines = [name for name in backends.names() if _is_engine(name)]
        self._values: dict[str, Any] = {}
        self._keys: dict[str, str] = {}

    def read(self) -> JobFile:
        """Read all keys and sections."""
        pairs: dict[str, dict[str, str]] = {}
        for key, value in self._content().items():
            if key not in (*_ROLES, _ENVIRONMENT, *self._engines):
                self._read_top(key, value)
            elif type(value) is not dict:
                self._refuse_value(key, value, f"a section [{key}]")
            elif key in _ROLES:
                self._read_role(key, value)
            else:
                pairs[key] = dict(self._pair(key, name, one) for name, one in value.items())
        variables = pairs.pop(_ENVIRONMENT, {})
        return JobFile(self._path, self._values, self._keys, variables, pairs)

    def _content(self) -> dict[str, Any]:
        # `fleetrun --help` needs no parser of TOML
        from fleetlight.strategy import toml

        try:
            return toml.load(pathlib.Path(self._path))
        except StrategyError as error:
            raise ConfigError(f"--job {self._path}: {error}") from None

    def _read_top(self, key: str, value: Any) -> None:
        known = [name for name in self._flags if name not in (*_NO_KEYS, *_ELSEWHERE)]
        if type(value) is dict:
            self._refuse_section(key)
        if key in _ELSEWHERE:
            self._refuse(key, f"a job file has this as {_ELSEWHERE[key]}")
        if key not in known:
            self._refuse(key, f"no such key; {did_you_mean(key, known)}")
        self._keep(key, key, value)

    def _refuse_section(self, name: str) -> NoReturn:
        if name == "scheduler":
            self._refuse("[scheduler]", "an engine that needs a scheduler starts it; omit this")
        known = (*_ROLES, _ENVIRONMENT, *self._engines)
        self._refuse(f"[{name}]", f"no such section; {did_you_mean(name, known)}")

    def _read_role(self, role: str, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            if key not in _ROLES[role]:
                self._refuse(f"[{role}] {key}", f"no such key; {did_you_mean(key, _ROLES[role])}")
            self._keep(_ROLES[role][key], f"[{role}] {key}", value)

    def _keep(self, option: str, key: str, value: Any) -> None:
        """Check a value by the reader of its flag, and keep it."""
        self._keys[option] = key
        if option == "arguments":
            self._values[option] = self._arguments(key, value)
            return
        flag = self._flags[option]
        if flag.nargs == 0:
            if type(value) is not bool:
                self._refuse_value(key, value, "true or false")
            # a switch that is off is as one that is not given
            self._values |= {option: True} if value else {}
            return
        text = self._text_for(flag, key, value)
        if flag.type is None:
            self._values[option] = text
            return
        assert callable(flag.type)
        try:
            self._values[option] = flag.type(text)
        except argparse.ArgumentTypeError as error:
            self._refuse(key, str(error))

    def _text_for(self, flag: argparse.Action, key: str, value: Any) -> str:
        """The text that the flag would get."""
        types, expected = _FORMS[flag.type]
        is_list = flag.type in _LISTS
        values: Sequence[Any] = value if is_list and type(value) is list else [value]
        if is_list != (type(value) is list) or any(type(one) not in types for one in values):
            self._refuse_value(key, value, expected)
        return ",".join(map(str, values))

    def _arguments(self, key: str, value: Any) -> tuple[str, ...]:
        if type(value) is not list or any(type(one) not in _SCALARS for one in value):
            self._refuse_value(key, value, 'a list like ["--epochs", 3]')
        return tuple(self._text(key, one) for one in value)

    def _pair(self, section: str, name: str, value: Any) -> tuple[str, str]:
        """A variable or an option of an engine, as `--env` and `--option` would get it."""
        key = f"[{section}] {name}"
        pair = (name, self._text(key, value))
        if flag_values.pair("=".join(pair)) != pair:
            self._refuse(key, "got a name with '=' or spaces; expected NAME = VALUE")
        return pair

    def _text(self, key: str, value: Any) -> str:
        """A value as text: the entries of a list have commas between them, those of a table `=`."""
        if type(value) is bool:
            return "true" if value else "false"
        if type(value) in _SCALARS:
            return str(value)
        if type(value) is list:
            parts = [self._text(key, one) for one in value]
        elif type(value) is dict:
            parts = [f"{name}={self._text(key, one)}" for name, one in value.items()]
        else:
            self._refuse_value(key, value, "text in quotes, a number, true or false, or a list")
        if wrong := [part for part in parts if "," in part]:
            self._refuse(key, f"got {wrong[0]!r} in a list; expected an entry without a comma")
        return ",".join(parts)

    def _refuse_value(self, key: str, value: Any, expected: str) -> NoReturn:
        kind = _KINDS.get(type(value), "a date or time")
        shown = kind if type(value) is dict else f"{json.dumps(value, default=str)} ({kind})"
        self._refuse(key, f"got {shown}, expected {expected}")

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {key}: {why}")


def _is_engine(name: str) -> bool:
    return backends.named(name).chooses_machines
