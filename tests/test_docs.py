# SPDX-License-Identifier: Apache-2.0
"""The code of the documentation exists, parses, runs and equals the examples."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages.printed.blocks import FENCED, blocks_of
from pages.site import OUTSIDE

from fleetlight.cli.fleetrun import main as fleetrun

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PLAIN = "train_torch.py"
PAIRS = sorted(path.parent for path in (ROOT / "examples").glob(f"*/{PLAIN}"))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [code for kind, code in fenced(page.read_text()) if kind == language]


def fenced(text: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block."""
    return [(block.language, block.code) for block in blocks_of(text)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


_OWN = [
    "https://github.com/fleetlight/fleetlight/blob/main/",
    "https://raw.githubusercontent.com/fleetlight/fleetlight/main/",
]


def test_links_of_the_readme_work_on_other_sites() -> None:
    links = _LINK.findall(FENCED.sub("", (ROOT / "README.md").read_text()))
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_have_targets(page: Path) -> None:
    for link in _LINK.findall(FENCED.sub("", page.read_text())):
        # pages that leave the repository, such as README.md, link to it
        own = next((link[len(one) :] for one in _OWN if link.startswith(one)), None)
        if own is None and re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = (link if own is None else own).partition("#")
        folder = page.parent if own is None else ROOT
        target = (folder / name).resolve() if name else page
        assert target.exists(), f"{relative(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{relative(page)} links to {link}"


def test_site_includes_every_page() -> None:
    shown = re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    shown = [page for page in shown if page not in OUTSIDE]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(shown) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block, relative(page))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_toml_blocks_parse(page: Path) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_fences_are_closed(page: Path) -> None:
    fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0


SITE = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / path for path in sorted(OUTSIDE.values()))]


@pytest.mark.parametrize("page", SITE, ids=relative)
def test_code_has_a_language(page: Path) -> None:
    opened = re.findall(r"^ *```(\S*)$", page.read_text(), re.MULTILINE)[::2]
    assert "" not in opened
    # code by indentation has no language; in a list it is a paragraph
    outside = FENCED.sub("", page.read_text())
    assert not re.search(r"^[^\s\-*=\d].*\n\n    \S", outside, re.MULTILINE)


@pytest.mark.parametrize("example", PAIRS, ids=relative)
def test_page_shows_the_difference_of_the_pair(example: Path) -> None:
    plain, *ours = [example / PLAIN, *sorted(set(example.glob("train_*.py")) - {example / PLAIN})]
    page = ROOT / "docs" / "examples" / f"{example.name}.md"
    assert ours
    assert blocks(page, "diff") == [difference(plain, script) for script in ours]


def difference(plain: Path, ours: Path) -> str:
    sides = [path.read_text().splitlines() for path in (plain, ours)]
    lines = difflib.unified_diff(*sides, plain.name, ours.name, n=1, lineterm="")
    return "\n".join(lines) + "\n"


def test_job_file_of_the_page_equals_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "launcher.md"
    [file] = [one for one in blocks(page, "toml") if "[worker]" in one]
    [flags] = [one for one in blocks(page, "sh") if "--on slurm" in one]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(file)
    (tmp_path / "train.py").write_text("")
    shown = []
    for words in (["--job", "job.toml"], shlex.split(flags)[1:]):
        assert fleetrun(["--print", *words]) == 0
        shown.append(capfd.readouterr().out)
    assert "#SBATCH --ntasks=6" in shown[0]
    assert shown[0] == shown[1]
    assert fleetrun(["--print", "--job", "job.toml", "--on", "kubernetes"]) == 0
    assert "registry.example/train:3" in capfd.readouterr().out


@pytest.mark.multiprocess
def test_quick_start_trains_the_same_weights_alone_and_in_a_job(tmp_path: Path) -> None:
    plain, ours = blocks(ROOT / "docs" / "quickstart.md", "python")[:2]
    assert "fleet" not in plain
    (tmp_path / "train.py").write_text(ours)
    job = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2", "train.py"]
    alone = weights([sys.executable, "train.py"], tmp_path)
    assert weights(job, tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
@pytest.mark.multiprocess
def test_example_of_many_features_prints_its_comment(tmp_path: Path) -> None:
    page = ROOT / "docs" / "parameter-servers.md"
    [program] = [one for one in blocks(page, "python") if "EmbeddingCollection" in one]
    [printed] = re.findall(r"^# (.+)$", program, re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == printed, done.stderr


#: replaces the parts of lightning that the page uses
LIGHTNING = "from torch.nn import Module as LightningModule\n"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", range(2))
def test_loops_that_replace_a_trainer_reduce_during_backward(number: int, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    _, found, section = page.partition("## Accelerate, the Trainer and Lightning\n")
    programs = [code for kind, code in fenced(section) if kind == "python"]
    assert found
    assert len(programs) == 2
    (tmp_path / "train.py").write_text(programs[number])
    if importlib.util.find_spec("lightning") is None:
        (tmp_path / "lightning.py").write_text(LIGHTNING)
    job = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2", "train.py"]
    printed(job, tmp_path)
    log = "".join(path.read_text() for path in (tmp_path / "log").glob("workerlog.*"))
    zero, one = re.findall(r"worker \d: weights (\S+)", log)
    assert zero == one
    assert "all_reduce: " in log
    assert "not reduced during backward" not in log


@pytest.mark.gate
@pytest.mark.long
@pytest.mark.multiprocess
def test_first_program_of_the_readme_equals_the_quick_start_and_learns(tmp_path: Path) -> None:
    shown = blocks(ROOT / "README.md", "python")[0]
    program = blocks(ROOT / "docs" / "quickstart.md", "python")[2]
    assert [line for line in shown.splitlines() if line] == [
        line for line in program.splitlines() if line
    ]
    (tmp_path / "clicks.py").write_text(program.replace("00_000", "_000"))
    job = [sys.executable, "-m", "fleetlight.launch", "--server_num", "2", "--worker_num", "2"]
    output = printed([*job, "clicks.py"], tmp_path)
    assert 0.6 < float(re.findall(r"AUC (\S+)", output)[0]) < 0.8


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", range(4))
def test_programs_of_the_page_about_static_programs_run(number: int, tmp_path: Path) -> None:
    found = blocks(ROOT / "docs" / "static.md", "python")
    assert len(found) == 4
    (tmp_path / "program.py").write_text(found[number])
    printed([sys.executable, "program.py"], tmp_path)


@pytest.mark.long
@pytest.mark.multiprocess
def test_program_of_the_page_about_metrics_prints_the_same_with_workers(tmp_path: Path) -> None:
    page = ROOT / "docs" / "metrics.md"
    program = next(body for body in blocks(page, "python") if "fleet.init" in body)
    (tmp_path / "rank.py").write_text(program)
    shown = next(body for body in blocks(page, "text") if "GAUC" in body)
    job = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2", "rank.py"]
    for command in ([sys.executable, "rank.py"], job):
        assert shown in printed(command, tmp_path)


def weights(command: list[str], folder: Path) -> list[float]:
    """The last line that the quick start's script prints."""
    output = printed(command, folder)
    return [float(number) for number in re.findall(r"worker 0: weights (\S+)", output)]


def printed(command: list[str], folder: Path) -> str:
    """The standard output of a command."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        text=True,
        capture_output=True,
        timeout=100,
    ).stdout
