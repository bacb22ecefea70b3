# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages from elsewhere, links into the repository, drawings in the page."""

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
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'<p><img alt="([^"]*)" src="([^"]*/)?(\w[\w-]*\.svg)" ?/?></p>')
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
    """Let links into the repository work on the site, and leave marks of outputs out."""
    place = page.file.src_uri
    here = posixpath.dirname(OUTSIDE.get(place, f"docs/{place}"))
    parts = _FENCE.split(MARK.sub("", markdown))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, match[1]))
        return f"]({_target(path, place, config.repo_url)}{match[2] or ''})"

    parts[::2] = [_LINK.sub(link, text) for text in parts[::2]]
    return "".join(parts)


def _target(path: str, place: str, repository: str) -> str:
    """The link from a page of the site to a file of the repository."""
    if path in _PLACES or path.startswith("docs/"):
        there = _PLACES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(place) or ".")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository}/{kind}/main/{path}"


def on_page_content(text: str, page: Any, config: Any, files: Any) -> str:
    """Put drawings into the page, and the head of each column beside its cells."""
    return _TABLE.sub(_labelled, _IMAGE.sub(_drawn, text))


def _drawn(match: re.Match[str]) -> str:
    """A drawing inside the page, where it has the colours of the page."""
    for folder in ("docs/images", "benchmarks/results"):
        path = ROOT / folder / match[3]
        if path.exists() and 'class="drawing"' in (drawing := path.read_text()):
            return f'<div class="drawing">{drawing}</div>'
    return match[0]


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
