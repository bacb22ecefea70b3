# SPDX-License-Identifier: Apache-2.0
"""Kills during all other harm: as `killing`, with fewer kills, since each takes longer.

python -m tests.chaos.harming --kills 10 --seed 1
"""

import sys
from collections.abc import Sequence

from tests.chaos import killing
from tests.chaos.harms import HARMS

KILLS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """As in `killing`."""
    given = sys.argv[1:] if argv is None else argv
    return killing.main(["--kills", str(KILLS), "--harms", *HARMS, "freeze", *given])


if __name__ == "__main__":
    sys.exit(main())
