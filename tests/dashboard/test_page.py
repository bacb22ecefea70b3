# SPDX-License-Identifier: Apache-2.0
"""The files of the page: small, complete, and without anything from elsewhere."""

import re
from pathlib import Path

import fleetlight.dashboard

PAGE = Path(fleetlight.dashboard.__file__).with_name("page")
FILES = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
OWN = {name: text for name, text in FILES.items() if not name.startswith("uplot.")}


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < 300_000


def test_everything_is_in_the_folder() -> None:
    linked = set(re.findall(r'(?:src|href)="([^"#]+)"', FILES["index.html"]))
    imported = {name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported <= FILES.keys()
    assert FILES.keys() - {"index.html", "uplot.LICENSE"} <= linked | imported
    for name, text in OWN.items():
        assert set(re.findall(r"\w+://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_the_policy_of_the_page_allows_all_of_it() -> None:
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", FILES["index.html"])
    for text in OWN.values():
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_scripts_use_elements_of_the_page() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', FILES["index.html"]))
    used = {
        name for text in OWN.values() for name in re.findall(r'(?:byId|showChart)\("([^"]+)"', text)
    }
    assert used
    assert used <= ids


def test_the_vendored_library_has_its_licence() -> None:
    assert "MIT License" in FILES["uplot.LICENSE"]
    assert "uPlot (v1.6.32)" in FILES["uplot.js"][:200]
