# SPDX-License-Identifier: Apache-2.0
"""`python -m pages` writes the generated pages, diagrams and charts of docs/."""

from __future__ import annotations

import sys

from pages.generated import DOCS, generated, outdated


def main() -> int:
    """Write what has changed; returns the exit code."""
    changed = outdated()
    for name in changed:
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generated()[name])
        print(f"wrote docs/{name}")
    print(f"{len(changed)} of {len(generated())} files have changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
