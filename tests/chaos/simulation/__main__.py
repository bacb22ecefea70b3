# SPDX-License-Identifier: Apache-2.0
"""Simulated schedules of servers, workers, launchers and jobs that form.

python -m tests.chaos.simulation --schedules 100000 --seed 1 --jobs 2
"""

import sys

from tests.chaos.simulation.running import main

if __name__ == "__main__":
    sys.exit(main())
