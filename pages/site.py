# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages from elsewhere, links into the repository and to names."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: pages of the site that are elsewhere in the repository
OUTSIDE = {
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "benchmarks/index.md": "benchmarks/README.md",
    **{
        f"benchmarks/results/{path.name}": f"benchmarks/results/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}
#: pictures of result pages
PICTURES = [
    f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.svg")
]
#: the place on the site of a file of the repository
_PLACES = {path: place for place, path in [*OUTSIDE.items(), *zip(PICTURES, PICTURES, strict=True)]}
#: the comment above a block that shows an output (`pages/printed/outputs.py`)
MARK = re.compile(r"^ *<!-- output\b(.*) -->\n", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
#: the directive of a public name; of serve and strategy scripts import the names
_DIRECTIVE = re.compile(r"^::: fleetlight\.(?!serve\.|strategy\.)(\S+)$", re.MULTILINE)
_HEADED = r"\g<0>\n    options:\n      heading: fleet.\1\n      toc_label: fleet.\1"
#: a mention of a name, neither in a link nor in a heading
_MENTION = re.compile(r"<code>fleet(?:light)?\.([\w.]+)(?:\(.*?\))?</code>(?!</a>|</h|<a class)")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for path, place in _PLACES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links into the repository work, head names as scripts write them, leave marks out."""
    place = page.file.src_uri
    here = posixpath.dirname(OUTSIDE.get(place, f"docs/{place}"))
    parts = _FENCE.split(MARK.sub("", markdown))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, match[1]))
        return f"]({_target(path, place, config.repo_url)}{match[2] or ''})"

    parts[::2] = [_LINK.sub(link, _DIRECTIVE.sub(_HEADED, text)) for text in parts[::2]]
    return "".join(parts)


def _target(path: str, place: str, repository: str) -> str:
    """The link from a page of the site to a file of the repository."""
    if path in _PLACES or path.startswith("docs/"):
        there = _PLACES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(place) or ".")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository}/{kind}/main/{path}"


def on_page_content(text: str, page: Any, config: Any, files: Any) -> str:
    """Link names to the reference where it has them; put heads of columns beside their cells."""
    linked = _MENTION.sub(r'<autoref optional identifier="fleetlight.\1">\g<0></autoref>', text)
    return _TABLE.sub(_labelled, linked)


def _labelled(match: re.Match[str]) -> str:
    table = match[0]
    heads = [html.escape(_TAG.sub("", head).strip(), quote=True) for head in _HEAD.findall(table)]
    before, *rows = table.split("<tr>")
    labelled = []
    for row in rows:
        cells = row.split("<td")
        # the first cell names the row
        for number in range(2, len(cells)):
            if number <= len(heads):
                cells[number] = f' data-label="{heads[number - 1]}"{cells[number]}'
        labelled.append("<td".join(cells))
    return "<tr>".join([before, *labelled])
