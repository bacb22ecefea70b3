# SPDX-License-Identifier: Apache-2.0
"""`python -m pages` writes the generated pages and the charts of docs/.

`python -m pages outputs` runs the commands that pages print, and writes the outputs that have
changed. `python -m pages outputs docs/quickstart.md` does so for one page; `--numbers` writes all
outputs, also those in which only numbers differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pages.generated import DOCS, generated, outdated
from pages.printed.outputs import marked_pages, written


def main(arguments: Sequence[str]) -> int:
    """Write what has changed; returns the exit code."""
    if arguments[:1] == ["outputs"]:
        return _write_outputs(arguments[1:])
    made = generated()
    changed = outdated(made)
    for name in changed:
        (DOCS / name).write_text(made[name])
        print(f"wrote docs/{name}")
    print(f"{len(changed)} of {len(made)} files have changed")
    return 0


def _write_outputs(arguments: Sequence[str]) -> int:
    """Write the outputs of the pages that are named, or of all."""
    pages = [Path(name).resolve() for name in arguments if name != "--numbers"]
    for line in written(pages or marked_pages(), numbers="--numbers" in arguments):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
