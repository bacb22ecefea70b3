# SPDX-License-Identifier: Apache-2.0
"""What today's code is excused from, in `exceptions.json`. It may only shrink.

`python -m tests.tidy.exceptions` writes the file from the code. Look at its diff before
you commit it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tidy import circles, shape
from tests.tidy.sources import relative

FILE = Path(__file__).with_suffix(".json")
#: the reason of a small file that no engineer has looked at yet
NOT_YET_MERGED = "not yet merged"
HOW_TO_SHRINK = (
    f"{relative(FILE)} lists what is left to do and may only shrink: fix what is new in the code; "
    "where the code has got better, run `python -m tests.tidy.exceptions` and commit its result"
)


def excused() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text())
    return loaded


def found(reasons: dict[str, str]) -> dict[str, Any]:
    """What the code needs to be excused from; small files keep their reasons."""
    return {
        "circles": circles.circles(),
        "crowded_folders": shape.crowded_folders(),
        "repeated_classes": shape.repeated_classes(),
        "small_files": {file: reasons.get(file, NOT_YET_MERGED) for file in shape.small_files()},
    }


def main() -> None:
    reasons = excused()["small_files"] if FILE.exists() else {}
    FILE.write_text(json.dumps(found(reasons), indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
