# SPDX-License-Identifier: Apache-2.0
"""The notebook trains a model, is stored without outputs, and names a script that exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.notebook import code_cells

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "wide_deep.ipynb"


def test_notebook_is_stored_without_outputs() -> None:
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in code_cells(NOTEBOOK):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_links_of_the_notebook_name_files_that_exist() -> None:
    paths = re.findall(r"/blob/main/([^)\s]+)\)", NOTEBOOK.read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).is_file()


@pytest.mark.long
@pytest.mark.slow
def test_notebook_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.examples.notebook", str(NOTEBOOK)]
    told = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    (reached, best) = re.findall(r"AUC (\S+), best possible (\S+)", done.stdout)[0]
    assert 0.73 < float(reached) < float(best)
