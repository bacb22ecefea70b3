# SPDX-License-Identifier: Apache-2.0
"""Runs the code cells of a notebook in one namespace: `python -m tests.examples.notebook FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def main() -> None:
    path = Path(sys.argv[1])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        exec(
            compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), namespace
        )


if __name__ == "__main__":
    main()
