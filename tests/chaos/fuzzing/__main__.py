# SPDX-License-Identifier: Apache-2.0
"""Almost valid frames, for the decoder and for servers that listen.

python -m tests.chaos.fuzzing --frames 1000000 --seed 1
"""

import sys

from tests.chaos.fuzzing.running import main

if __name__ == "__main__":
    sys.exit(main())
