# SPDX-License-Identifier: Apache-2.0
"""Several processes of one machine look rows up while publications replace each other."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.serve.target import Target

pytestmark = pytest.mark.multiprocess

PROCESSES, LAST, ROWS = 4, 30, 2000
#: all rows of publication n have the value n, also those that only its base has
SCRIPT = f"""
import sys
import numpy as np
from fleetlight.serve import Reader

ids = np.arange({ROWS})
lookups = 0
with Reader(sys.argv[1], cache=sys.argv[2], period_s=0.001) as reader:
    print("ready", flush=True)
    number = 0
    while number < {LAST}:
        view = reader.view
        assert view.number >= number, (view.number, number)
        number = view.number
        rows = view.lookup("emb", ids)
        assert (rows == number).all(), (number, np.unique(rows))
        assert view.dense["bias"][0] == number
        lookups += 1
print("done", number, flush=True)
"""


def test_no_lookup_fails_while_publications_are_swapped(tmp_path: Path) -> None:
    target = Target(tmp_path / "target")
    target.base(dict.fromkeys(range(ROWS), 1.0))
    command = [sys.executable, "-c", SCRIPT, str(target.folder), str(tmp_path / "cache")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n", one.communicate()[1]
        for number in range(2, LAST + 1):
            rows = dict.fromkeys(range(ROWS), float(number))
            if number % 5:
                target.delta(rows)
            else:
                before = target.manifest
                target.base(rows)
                # no time to read the old files: readers continue with the new base
                assert before is not None
                target.store.delete(before.names)
        for one in running:
            out, err = one.communicate(timeout=60)
            assert (one.returncode, out) == (0, f"done {LAST}\n"), err
    finally:
        for one in running:
            one.kill()
            one.wait()
