# SPDX-License-Identifier: Apache-2.0
"""What a path opened: its functions in the order of their first calls, counted."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

from tests.reading.recorder import MODULE, WINDOWS

#: the packages of Fleetlight by what they are for; others are counted under their own names
GROUPS = {
    "top": (
        *("fleet", "static", "data", "checkpoint", "strategy", "roles", "store", "serve"),
        *("publication", "torch_compat", "optim"),
    ),
    "core": ("ps", "kernels", "wire", "collective"),
    "around": (
        *("launch", "cli", "dashboard", "observe", "security", "files", "errors", "ray", "torchx"),
        *("wording", "version", "__init__", "__main__"),
    ),
}
_GROUP_OF = {package: group for group, packages in GROUPS.items() for package in packages}


@dataclasses.dataclass(frozen=True, order=True)
class Call:
    """The first call of a function in a process."""

    ns: int
    file: str
    line: int
    name: str
    #: "function", MODULE, or what else Python makes code objects of
    kind: str
    process: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.file, self.line, self.name

    @property
    def group(self) -> str:
        package = self.file.partition("/")[0].removesuffix(".py")
        return _GROUP_OF.get(package, package)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A path that was taken."""

    calls: tuple[Call, ...]
    #: how often functions were called, in all processes
    call_count: int = 0
    #: the most functions of the package on one stack
    deep: int = 0

    @classmethod
    def read(cls, folder: Path, window: int) -> Trace:
        """What the processes of a job wrote about a window."""
        calls: list[Call] = []
        for path in folder.glob("*.calls"):
            for line in path.read_text().splitlines():
                number, ns, file, at, name, kind = line.split("\t")
                if int(number) == window:
                    calls.append(Call(int(ns), file, int(at), name, kind, path.stem))
        counts = [array("Q", path.read_bytes()) for path in folder.glob("*.counts")]
        return cls(
            tuple(sorted(calls)),
            sum(each[window] for each in counts),
            max((each[WINDOWS + window] for each in counts), default=0),
        )

    @property
    def functions(self) -> dict[tuple[str, int, str], Call]:
        """The functions, each with its first call."""
        found: dict[tuple[str, int, str], Call] = {}
        for call in self.calls:
            if call.kind == "function":
                found.setdefault(call.key, call)
        return found

    @property
    def modules(self) -> set[str]:
        """The files that were executed as a whole: those that were imported."""
        return {call.file for call in self.calls if call.kind == MODULE}

    def without(self, other: Trace) -> Trace:
        """The part of this path that another one does not open."""
        known = other.functions.keys()
        return Trace(tuple(call for call in self.calls if call.key not in known))

    def numbers(self) -> dict[str, int]:
        """What ceilings may limit."""
        functions = list(self.functions.values())
        found = {"functions": len(functions), "files": len(_files(functions)), "deep": self.deep}
        for group in GROUPS:
            own = [call for call in functions if call.group == group]
            found |= {f"{group}_functions": len(own), f"{group}_files": len(_files(own))}
        top = {call.file for call in self.calls if call.kind == MODULE and call.group == "top"}
        found |= {"modules": len(self.modules), "top_modules": len(top), "calls": self.call_count}
        # one for each place in the source: Python 3.12 inlines comprehensions
        nameless = {call.key for call in self.calls if call.kind.startswith("<")}
        return found | {"nameless": len([key for key in nameless if key[2] != MODULE])}

    def by_process(self) -> dict[str, tuple[int, int]]:
        """The functions and files of each process."""
        functions = [call for call in self.calls if call.kind == "function"]
        return {
            process: (len(own), len(_files(own)))
            for process in sorted({call.process for call in functions})
            if (own := [call for call in functions if call.process == process])
        }

    def listing(self) -> Iterator[str]:
        """Files and their functions, in the order in which the path opens them."""
        by_file: dict[str, list[Call]] = {}
        for call in self.functions.values():
            by_file.setdefault(call.file, []).append(call)
        for file, calls in by_file.items():
            yield f"{file}  ({len(calls)})"
            yield from (f"    {call.line:>4}  {call.name}" for call in calls)


def by_package(trace: Trace) -> str:
    """The functions of each package."""
    ordered = sorted(call.file.partition("/")[0] for call in trace.functions.values())
    counts = [(len(list(calls)), package) for package, calls in itertools.groupby(ordered)]
    return ", ".join(f"{package} {count}" for count, package in sorted(counts, reverse=True))


def table(traces: Mapping[str, Trace]) -> Iterator[str]:
    """A row for each path: functions/files in all, and of each group of packages."""
    yield "path                  functions/files  deep  calls" + "".join(
        f"{group:>9}" for group in GROUPS
    )
    for name, trace in traces.items():
        n = trace.numbers()
        whole = f"{n['functions']}/{n['files']}"
        groups = (f"{n[f'{group}_functions']}/{n[f'{group}_files']}" for group in GROUPS)
        row = f"{name:<22}{whole:>15}{n['deep']:>6}{n['calls']:>7}"
        yield row + "".join(f"{group:>9}" for group in groups) + _more(trace, n)


def _more(trace: Trace, n: Mapping[str, int]) -> str:
    """The executed files, and the share of each of several processes."""
    words = []
    if n["modules"]:
        words.append(f"{n['modules']} files executed, {n['top_modules']} of top")
    if len(shares := trace.by_process()) > 1:
        words += [f"{name.partition('-')[0]} {a}/{b}" for name, (a, b) in shares.items()]
    return "".join(f"  {word}" for word in [", ".join(words)] if word)


def _files(calls: Iterable[Call]) -> Set[str]:
    return {call.file for call in calls}
