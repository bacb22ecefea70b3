# SPDX-License-Identifier: Apache-2.0
"""The rules that a program can check. What is excused may only shrink."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
from tests.tidy import circles
from tests.tidy.sources import PACKAGE, ROOT, SOURCES, parsed, relative

pytestmark = pytest.mark.style

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHON = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks", "rig", "pages", "release")
    for path in (ROOT / folder).rglob("*.py")
)

FUNCTION_LINES = 60
FILE_LINES = 800
PUBLIC_METHODS = 20
#: classes with more public methods; none may be added, and no number may rise
LARGE_CLASSES = {
    "Job": 40,
    "Roster": 32,
    "ServedJob": 30,
    "ServerState": 28,
    "Table": 28,
    "Communicator": 25,
    "Client": 23,
    "RowTable": 22,
}
#: the packages that may read the environment
READS_ENVIRONMENT = {"roles", "strategy", "launch", "cli", "ray.py"}
#: and the one file that asks where a user keeps caches: that is only ever said by a variable, as a
#: home folder is, and it decides about speed, never about the job
READS_CACHE_HOME = "src/fleetlight/kernels/compiling/compiled_files.py"
ENVIRONMENT = re.compile(r"\b(environb?|getenvb?|expandvars)\b")
#: tests of folders beside the package
ELSEWHERE = (
    "examples/",
    "multiprocess/",
    "benchmarks/",
    "ported/",
    "reading/",
    "release/",
    "rig/",
    "chaos/",
    "engines/",
    "tidy/",
    "gpu/",
    "pages/",
)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {circles.module_name(path): parsed(path) for path in SOURCES}


def package_of(module: str) -> str:
    return module.split(".")[1]


def public_methods(node: ast.ClassDef) -> int:
    return len({each.name for each in functions_of(node) if not each.name.startswith("_")})


def functions_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods that the class itself defines."""
    return [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_functions_and_files_are_short() -> None:
    assert not [
        f"{relative(path)}:{function.name}"
        for path in PYTHON
        for function in functions(parsed(path))
        if body_lines(function) > FUNCTION_LINES
    ]
    assert not [relative(p) for p in PYTHON if len(p.read_text().splitlines()) > FILE_LINES]


def test_classes_have_few_public_methods() -> None:
    large = {
        node.name: count
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and (count := public_methods(node)) > PUBLIC_METHODS
    }
    assert large == LARGE_CLASSES


def test_no_circle_of_imports_at_run_time() -> None:
    """Inside a package, imports for types alone may go round."""
    assert not circles.strong_components(circles.imports(modules()))


def test_imports_for_types_point_down_between_packages() -> None:
    """The contracts of import-linter leave these imports out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.split(" | ") for layer in contracts["contracts"][0]["layers"]]
    depth = {package: n for n, layer in enumerate(layers) for package in layer}
    between = [
        (source, target)
        for source, tree in modules().items()
        for target in circles.imported(ast.walk(tree), modules())
        if {"__main__"}.isdisjoint(source.split(".")) and source.count(".") and target.count(".")
        if package_of(source) != package_of(target)
    ]
    assert not [(s, t) for s, t in between if depth[package_of(s)] >= depth[package_of(t)]]


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    toy = {
        "a": ast.parse("from b import name"),
        "b": ast.parse("if TYPE_CHECKING:\n    import d\nelse:\n    from pkg import c, name"),
        "pkg": ast.parse(""),
        "pkg.c": ast.parse("def late():\n    import a"),
        "d": ast.parse("import a, b"),
    }
    graph = circles.imports(toy)
    assert graph["b"] == {"pkg", "pkg.c"}
    assert circles.strong_components(graph) == [["a", "b", "pkg.c"]]
    assert circles.strong_components({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == [["a", "b"]]


def test_every_file_has_a_licence_and_a_docstring() -> None:
    starts = ("# SPDX-License-Identifier: Apache-2.0\n", "#!")
    assert not [relative(p) for p in PYTHON if not p.read_text().startswith(starts)]
    assert not [relative(p) for p in PYTHON if not ast.get_docstring(parsed(p))]


def test_public_names_are_documented() -> None:
    bare = [
        f"{relative(path)}:{node.name}"
        for path in SOURCES
        for node in parsed(path).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not is_signature(node)
    ]
    assert not bare


def is_signature(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """An overload of a function, whose implementation follows."""
    return any(isinstance(by, ast.Name) and by.id == "overload" for by in node.decorator_list)


def test_only_some_packages_read_the_environment() -> None:
    guilty = []
    for path in SOURCES:
        said = path.read_text()
        if relative(path) == READS_CACHE_HOME:
            said = said.replace('os.environ.get("XDG_CACHE_HOME", "")', "", 1)
        may = path.relative_to(PACKAGE).parts[0] in READS_ENVIRONMENT
        if not may and ENVIRONMENT.search(said):
            guilty.append(relative(path))
    assert not guilty


def test_no_leftovers() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|breakpoint\(\)|pdb)\b")
    guilty = [relative(p) for p in PYTHON if p != Path(__file__) and pattern.search(p.read_text())]
    assert not guilty


def test_no_named_tuple_is_generic() -> None:
    """Python 3.10 refuses such a class when it is made."""
    pattern = re.compile(r"^class \w+\((NamedTuple, Generic|Generic\[.*\bNamedTuple)", re.MULTILINE)
    assert not [relative(path) for path in PYTHON if pattern.search(path.read_text())]


def test_no_module_for_miscellany() -> None:
    # fleet.util is Fleet's public name
    drawers = {p for p in SOURCES if re.fullmatch(r"(utils?|misc|common|helpers?)\.py", p.name)}
    assert {relative(p) for p in drawers} <= {"src/fleetlight/fleet/public/util.py"}


def test_tests_mirror_sources() -> None:
    tested = {
        str(p.relative_to(ROOT / "tests")).replace("test_", "")
        for p in (ROOT / "tests").rglob("test_*.py")
    }
    known = {str(p.relative_to(PACKAGE)) for p in SOURCES}
    folders = {str(Path(p).parent) for p in known}
    # a test file in a mirrored folder names a module of the package, or a behaviour of the whole
    strangers = {t for t in tested if "/" in t and str(Path(t).parent) not in folders}
    assert not {s for s in strangers if not s.startswith(ELSEWHERE)}


#: files that may read the wall clock, how often, and why
READS_TIME_OF_DAY = {
    # the doctor compares the clocks of machines: certificates and file times depend on them
    "src/fleetlight/launch/doctor/probe.py": 1,
    "src/fleetlight/launch/doctor/joint_examination.py": 1,
    # dates for people: when a file was saved
    "src/fleetlight/checkpoint/storage/generations.py": 1,
    # distinguishes successive starts of a worker, even on another machine
    "src/fleetlight/ps/worker/replay/step_journal.py": 1,
    # the age of a publication, which other machines read
    "src/fleetlight/fleet/served/publishing/publisher.py": 1,
    "src/fleetlight/serve/reader.py": 1,
    # dates in certificates
    "src/fleetlight/security/certificates.py": 1,
    "src/fleetlight/security/certificate_folder.py": 1,
    # the format of torch.distributed.elastic has a date
    "src/fleetlight/launch/failure_reason.py": 1,
    # metrics of several machines share a time axis
    "src/fleetlight/observe/telemetry/registry.py": 1,
    "src/fleetlight/observe/telemetry/recorder.py": 1,
    "src/fleetlight/observe/sinks/feeder.py": 1,
    "src/fleetlight/dashboard/feed.py": 1,
    "src/fleetlight/observe/tracing/spans.py": 1,
    "src/fleetlight/observe/tracing/clocks.py": 1,
    "src/fleetlight/ps/messages.py": 1,
    "src/fleetlight/cli/stored/running_tables.py": 1,
    "src/fleetlight/cli/watch/top.py": 1,
}
TIME_OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def test_durations_use_a_monotonic_clock() -> None:
    """The wall clock jumps; `time.monotonic` and `time.perf_counter` do not."""
    asked = {
        relative(path): count
        for path in SOURCES
        if (
            count := sum(
                ast.unparse(node).removeprefix("datetime.datetime.") in TIME_OF_DAY
                or ast.unparse(node).endswith("datetime.now")
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Attribute)
            )
        )
    }
    assert asked == READS_TIME_OF_DAY
    # nothing is imported from `time`: the search above would miss it
    imported = [n for p in SOURCES for n in ast.walk(parsed(p)) if isinstance(n, ast.ImportFrom)]
    assert not [node for node in imported if node.module == "time"]
