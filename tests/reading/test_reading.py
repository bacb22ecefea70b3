# SPDX-License-Identifier: Apache-2.0
"""The reading tool on a toy package, whose functions are counted by hand."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.reading import ceilings
from tests.reading.jobs import JOBS, Starter
from tests.reading.paths import FAST, PATHS
from tests.reading.trace import Trace, table

TOY = """
    import threading
    def outer():
        class Local:
            def method(self):
                return [each() for each in (lambda: 1, lambda: 2)]
        return Local().method(), list(generated())
    def generated():
        yield from (n for n in range(3))
    def in_thread():
        thread = threading.Thread(target=deep, args=(3,))
        thread.start()
        thread.join()
    def deep(n):
        return n and deep(n - 1)
    def unused():
        pass
"""
SCRIPT = """
    import os, subprocess, sys
    from tests.reading.recorder import window
    import toy
    if sys.argv[1:] == ["child"]:
        import toy.late
        toy.late.begin()
        sys.exit()
    toy.unused()
    with window(1):
        toy.outer()
        toy.outer()
        toy.in_thread()
        subprocess.run([sys.executable, __file__, "child"], check=True)
        pid = os.fork()
        if not pid:
            toy.outer()
            os._exit(0)
        os.waitpid(pid, 0)
    with window(2, everywhere=False):
        toy.outer()
        subprocess.run([sys.executable, __file__, "child"], check=True)
    toy.unused()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes of a script have written."""
    root = tmp_path_factory.mktemp("toy")
    (root / "toy").mkdir()
    (root / "toy" / "__init__.py").write_text(textwrap.dedent(TOY))
    (root / "toy" / "late.py").write_text("def begin():\n    pass\n")
    (root / "script.py").write_text(textwrap.dedent(SCRIPT))
    Starter(root / "job", root / "toy").run(([str(root / "script.py")], {}))
    return root / "job"


@pytest.mark.slow
def test_functions_of_all_threads_and_processes_are_counted_once(folder: Path) -> None:
    trace = Trace.read(folder, 1)
    names = ["outer", "outer.<locals>.Local.method", "generated", "in_thread", "deep", "begin"]
    assert [name.rpartition(".")[2] for name in names] == [
        call.name.rpartition(".")[2] for call in trace.functions.values()
    ]
    numbers = trace.numbers()
    assert (numbers["functions"], numbers["files"], numbers["deep"]) == (6, 2, 4)
    assert trace.modules == {"__init__.py", "late.py"}  # of the child; the script had imported toy
    assert sorted(trace.by_process().values()) == [(1, 1), (3, 1), (5, 1)]
    assert "late.py  (1)" in list(trace.listing())
    assert "6/2" in list(table({"toy": trace}))[1]


@pytest.mark.slow
def test_a_window_of_one_process_leaves_out_the_others(folder: Path) -> None:
    own = Trace.read(folder, 2)
    assert [call.name.rpartition(".")[2] for call in own.functions.values()] == [
        *("outer", "method", "generated")
    ]
    assert [call.name for call in Trace.read(folder, 1).without(own).functions.values()] == [
        *("in_thread", "deep", "begin")
    ]


@pytest.mark.slow
def test_a_path_above_its_ceiling_is_named(folder: Path) -> None:
    traces = {"toy": Trace.read(folder, 1), "own": Trace.read(folder, 2)}
    budget = "[lines]\nps = 7\n\n[reading.toy]\nfunctions = 5\nfiles = 9\n"
    above, without = ceilings.exceeded(traces, ceilings.read(budget))
    assert above.startswith("toy: functions 6, ceiling 5. Run `python -m tests.reading toy -v`")
    assert without.startswith("own has no ceiling")
    lower = ceilings.lowered(budget, traces)
    expected = {"toy": {"functions": 5, "files": 2}, "own": {"functions": 3, "files": 1}}
    assert ceilings.read(lower) == expected
    assert lower.startswith("[lines]\nps = 7\n\n[reading.toy]\n")


def test_each_path_has_a_job() -> None:
    assert {path.job for path in PATHS.values()} == set(JOBS)
    assert set(FAST) <= set(JOBS)
    assert {path.over for path in PATHS.values()} - {""} <= set(PATHS)
