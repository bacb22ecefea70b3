# SPDX-License-Identifier: Apache-2.0
"""What the packages of a release tell: extras, links, versions, and the files that they have."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
#: the extra of a developer, not of a purpose
DOCS = {"docs"}


def test_each_supported_python_has_a_classifier() -> None:
    words = "\n".join(PROJECT["project"]["classifiers"])
    minors = [int(minor) for minor in re.findall(r":: 3\.(\d+)$", words, re.MULTILINE)]
    lowest, highest = re.findall(r"\(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert minors == list(range(int(lowest), int(highest) + 1))
    assert PROJECT["project"]["requires-python"] == f">=3.{lowest}"


def test_links_are_those_of_the_documentation() -> None:
    url = re.search(r"^repo_url: (.+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert url
    links = PROJECT["project"]["urls"]
    assert {"Documentation", "Source", "Changelog", "Issues"} <= set(links)
    for link in links.values():
        assert link.startswith(url[1])
        for path in re.findall(r"/(?:tree|blob)/main/(.+)", link):
            assert (ROOT / path).exists()


def test_all_has_each_extra_of_users() -> None:
    (every,) = map(Requirement, EXTRAS["all"])
    assert every.name == "fleetlight"
    assert every.extras == set(EXTRAS) - {"all"} - DOCS


def test_each_extra_that_the_package_or_its_pages_name_exists() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        name: file
        for file in files
        for name in re.findall(r"fleetlight\[(\w+)\]", file.read_text())
    }
    assert named
    assert set(named) <= set(EXTRAS), named


def test_developers_get_what_users_can_get() -> None:
    packages = map(Requirement, [*groups()["test"], *groups()["test-extras"]])
    extras = set().union(*(each.extras for each in packages if each.name == "fleetlight"))
    # ray is large, and its tests are skipped without it
    assert extras == set(EXTRAS) - {"all", "ray"} - DOCS


def groups() -> dict[str, list[str]]:
    found: dict[str, list[str]] = PROJECT["dependency-groups"]
    return found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("once"))


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    return folder


@pytest.mark.slow
def test_second_build_has_the_same_bytes(packages: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    names = sorted(path.name for path in packages.iterdir())
    assert [Path(name).suffix for name in names] == [".whl", ".gz"]
    for name in names:
        assert (packages / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.slow
def test_sdist_has_every_file_of_the_repository(packages: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so nothing says which files belong to it")
    (path,) = packages.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    present = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert present - inside == set()
    assert not any("__pycache__" in name or name.startswith(("log/", ".venv")) for name in inside)


@pytest.mark.slow
def test_wheel_has_the_package_alone(packages: Path) -> None:
    (path,) = packages.glob("*.whl")
    names = zipfile.ZipFile(path).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fleetlight"}
    assert "fleetlight/py.typed" in names
    assert "fleetlight/launch/processes/preloading/hook/sitecustomize.py" in names
