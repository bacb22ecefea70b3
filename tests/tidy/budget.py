# SPDX-License-Identifier: Apache-2.0
"""How many lines of code each package has, held against `budget.toml`.

A line counts if it carries a token that is neither comment nor docstring. `make check` fails when
a package has more lines than its budget; `python -m tests.tidy.budget` writes what the code has
now, so that a package that shrank cannot grow back. A commit that raises a number says why.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter

from tests.tidy.sources import PACKAGE, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = ROOT / "budget.toml"
#: folders beside the package
BESIDE = ("tests", "benchmarks", "pages", "release", "rig", "examples")
PAGE = PACKAGE / "dashboard" / "page"
SCRIPTS = "src/fleetlight/dashboard/page"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Lines of Python that carry code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def script_lines(source: str) -> int:
    """Lines of a page's script or style that are neither empty nor a comment."""
    bare = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    return sum(
        bool(line.strip()) and not line.strip().startswith("//") for line in bare.splitlines()
    )


def counted() -> dict[str, int]:
    """Lines of code of each package, of each folder beside it, and of the page's scripts."""
    lines: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).parts
        room = place[0] if len(place) > 1 else "*.py"
        lines[f"src/fleetlight/{room}"] += code_lines(path.read_text())
    for folder in BESIDE:
        lines[folder] = sum(code_lines(p.read_text()) for p in (ROOT / folder).rglob("*.py"))
    for pattern in ("*.js", "*.css", "*.html"):
        own = (p for p in PAGE.glob(pattern) if not p.name.startswith("uplot."))
        lines[SCRIPTS] += sum(script_lines(path.read_text()) for path in own)
    return dict(lines)


def limits() -> dict[str, int]:
    text = FILE.read_text() if FILE.exists() else ""
    lines: dict[str, int] = tomllib.loads(text).get("lines", {})
    return lines


def too_long(lines: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """What has more lines than its budget."""
    return [
        f"{name} has {count} lines of code, its budget is {allowed.get(name, 0)}: make it shorter, "
        f"or raise it in budget.toml and say in the commit why"
        for name, count in lines.items()
        if count > allowed.get(name, 0)
    ]


def written(lines: dict[str, int], text: str) -> str:
    """The text of `budget.toml` with other lines in its table `lines`."""
    table = "[lines]\n" + "".join(f'"{name}" = {lines[name]}\n' for name in sorted(lines))
    return re.sub(r"^\[lines\]\n(?:\".*\n)*|\Z", table, text, count=1, flags=re.MULTILINE)


def main() -> None:
    lines = counted()
    text = FILE.read_text() if FILE.exists() else ""
    FILE.write_text(written(lines, text))
    groups = {
        "the package": sum(lines[n] for n in lines if n.startswith("src/") and n != SCRIPTS),
        "tests": lines["tests"],
        "benchmarks, pages, release": sum(lines[n] for n in ("benchmarks", "pages", "release")),
    }
    for name, count in groups.items():
        print(f"{count:7,} {name}")


if __name__ == "__main__":
    main()
