# SPDX-License-Identifier: Apache-2.0
"""The outputs that pages show have the shape of what their commands print now."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.printed import outputs
from pages.printed.blocks import PrintedBlock, blocks_of, edited, section
from pages.printed.outputs import Output, command_of, marked_pages, outputs_of, rewritten, written
from pages.printed.shapes import portable, shape
from pages.printed.terminal import Terminal, environment
from pages.printed.unmarked import UNMARKED
from pages.site import on_page_markdown
from tests.test_docs import ROOT, relative

PAGE = """\
# Page

The file `greet.py` of the page:

```python
print("hello", 1)
```

## Run

=== "Tab"

    ```sh
    echo nothing  # a comment
    python greet.py
    ```

    <!-- output of 2 -->
    ```text
    hello 7
    ```

In the new `greet.py` another line follows:

```diff
 print("hello", 1)
+print("end")
```

<!-- output of python greet.py | tail -n 1 -->
```text
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def of(language: str) -> list[PrintedBlock]:
    return [block for block in blocks_of(PAGE) if block.language == language]


def test_blocks_have_their_headings_files_and_commands() -> None:
    assert [block.heading for block in blocks_of(PAGE)] == ["Page", *["Run"] * 4]
    assert of("python")[0].file == of("diff")[0].file == "greet.py"
    assert of("sh")[0].commands == ["echo nothing", "python greet.py"]
    assert [block.mark for block in of("text")] == ["of 2", "of python greet.py | tail -n 1"]
    assert section(PAGE, "Page")[0].code == 'print("hello", 1)\n'
    with pytest.raises(ValueError, match="no heading 'Elsewhere'"):
        section(PAGE, "Elsewhere")


def test_loops_and_continued_lines_are_one_command() -> None:
    [block] = blocks_of("```sh\nfor i in 0 1; do\n    echo $i\ndone\n```\n")
    assert len(block.commands) == 1
    [block] = blocks_of("```sh\necho a \\\n    b\n```\n")
    assert len(block.commands) == 1


def test_commands_of_marks() -> None:
    block = of("sh")[0]
    assert "echo nothing" in command_of("", block)
    assert command_of("of 2 | tail", block).split() == [
        *"{",
        "python",
        "greet.py",
        *"}",
        "2>&1",
        "|",
        "tail",
    ]
    with pytest.raises(ValueError, match="needs a block of commands above it"):
        command_of("of 2", None)


def test_diffs_change_the_lines_that_they_show() -> None:
    assert edited("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(ValueError, match="not exactly once"):
        edited("a\na\n", "-a\n+b\n")


def test_only_outputs_of_another_shape_are_written(page: Path) -> None:
    found = list(outputs_of(page))
    assert [one.has_changed for one in found] == [False, True]
    text = rewritten(PAGE, found)
    assert "    hello 7\n" in text
    assert text.endswith("```text\nend\n```\n")
    assert "    hello 1\n" in rewritten(PAGE, found, numbers=True)


def test_second_run_changes_nothing(page: Path) -> None:
    first, second = written([page, page], numbers=False)
    assert first == "page.md: 1 of 2 outputs have changed"
    assert second == "page.md: 0 of 2 outputs have changed"


def test_shapes_ignore_numbers_with_their_units_and_the_order_of_lines() -> None:
    assert shape("1,024 rows in 3.5 ms\nend") == shape("end\n7 rows in 2 s")
    assert shape("2 servers") != shape("2 workers")
    assert shape("pid  12\n") == shape("pid 7\n")
    assert shape("worker 0: 1.5worker 1: 1.5\n\n") == shape("worker 0: 1.5\nworker 1: 1.5\n")


def test_paths_and_the_host_are_those_that_pages_show() -> None:
    places = {"/tmp/x1": "/home/me", "vm": "node1"}
    assert portable("\nsaved /tmp/x1/ckpt on vm \n", places) == "saved /home/me/ckpt on node1\n"
    assert portable("kvm", places) == "kvm\n"


def test_terminal_waits_for_background_jobs_and_keeps_variables(tmp_path: Path) -> None:
    with Terminal(tmp_path, environment()) as terminal:
        assert terminal.run("export A=3; false").code == 1
        terminal.run("(echo first; echo found $A) &")
        assert terminal.wait_for("found").endswith("found 3\n")
        assert terminal.run("wait; echo $A").text.endswith("3\n")


def test_terminal_shows_what_was_printed_instead(tmp_path: Path) -> None:
    with Terminal(tmp_path, environment(), limit_s=2.0) as terminal:
        terminal.run("echo other & wait")
        with pytest.raises(TimeoutError, match=r"did not show 'never.*' within 2 s"):
            terminal.wait_for("never")


def test_site_has_no_marks() -> None:
    shown = on_page_markdown(PAGE, SitePage(), SitePage(), None)
    assert "<!--" not in shown
    assert "hello 7" in shown


class SitePage:
    """The parts of a page and of the settings of MkDocs that the hook reads."""

    src_uri = "page.md"
    repo_url = ""

    @property
    def file(self) -> SitePage:
        return self


def test_each_output_has_a_mark_or_a_reason() -> None:
    unmarked = [
        f"{relative(page)}: {block.code.splitlines()[0]}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for block in outputs.parsed(page)
        if block.mark is None
        and block.language in ("text", "console")
        and "reference" not in page.parts
    ]
    starts = [start for of in UNMARKED.values() for start in of]
    assert [line for line in unmarked if not line.startswith(tuple(starts))] == []
    assert [start for start in starts if not any(line.startswith(start) for line in unmarked)] == []


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", marked_pages(), ids=relative)
def test_outputs_have_the_shape_of_what_is_printed_now(page: Path) -> None:
    found = list(outputs_of(page))
    changed = [one for one in found if one.has_changed]
    assert not changed, message(page, changed)


def message(page: Path, changed: list[Output]) -> str:
    shown = "\n".join(f"{one.block.mark}:\n{one.now}" for one in changed)
    return f"run `make outputs`; {relative(page)} shows other outputs than\n{shown}"
