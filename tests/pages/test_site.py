# SPDX-License-Identifier: Apache-2.0
"""The home page's scripts run, and the messages of the troubleshooting page exist in the code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages.site import OUTSIDE, _labelled, _target, on_page_content
from tests.test_docs import ROOT, blocks
from tests.tidy.sources import SOURCES, parsed

import fleetlight as fleet

PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    fleet.reset()


@pytest.mark.parametrize("number", range(4))
def test_scripts_of_the_home_page_train(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = blocks(ROOT / "docs" / "index.md", "python")
    assert len(scripts) == 4
    exec(compile(scripts[number], f"tab {number}", "exec"), {"__name__": "__main__"})
    assert 0.2 < float(capsys.readouterr().out.split()[-1]) < 0.8


@functools.cache
def messages() -> list[str]:
    """The texts of the code, with a mark for each value in them."""
    nodes = (node for path in SOURCES for node in ast.walk(parsed(path)))
    return [shown(node) for node in nodes if isinstance(node, (ast.JoinedStr, ast.Constant))]


def shown(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(shown(value) for value in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdg]", "…", node.value)
    return "…"


@pytest.mark.parametrize("message", MESSAGES)
def test_message_exists(message: str) -> None:
    parts = [re.escape(part) for part in re.split("…+", message)]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in messages()), f"no code says {message!r}"


def test_links_from_the_site_into_the_repository() -> None:
    assert _target("docs/data.md", "architecture.md", "URL") == "data.md"
    assert _target("ARCHITECTURE.md", "examples/deepfm.md", "URL") == "../architecture.md"
    assert _target("examples/deepfm/model.py", "data.md", "URL").startswith("URL/blob/main/")
    assert _target("docker", "data.md", "URL") == "URL/tree/main/docker"
    assert _target("SECURITY.md", "engines/kubernetes.md", "URL") == "../security.md"
    assert "changelog.md" in OUTSIDE


def test_cells_have_the_heads_of_their_columns() -> None:
    table = "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"
    match = re.search(".+", table)
    assert match is not None
    assert '<td>1</td><td data-label="b">2</td>' in _labelled(match)


def test_mentions_of_names_are_links() -> None:
    link = '<autoref optional identifier="fleetlight.nn.X"><code>fleet.nn.X()</code></autoref>'
    assert on_page_content("<p><code>fleet.nn.X()</code></p>", None, None, None) == f"<p>{link}</p>"
    heading = "<h2><code>fleet.nn.X</code></h2>"
    assert on_page_content(heading, None, None, None) == heading
