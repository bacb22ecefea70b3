# SPDX-License-Identifier: Apache-2.0
"""The same script on each engine: the same bits as under fleetrun."""

import re
from pathlib import Path

import pytest
from tests.engines.running import ENGINES, JobRequest, harness, started

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]
REQUEST = JobRequest(
    script="tests/engines/wide_deep.py", modules=("examples/wide_deep/train_fleet.py",), nodes=4
)


def trained(engine: str, folder: Path) -> tuple[str, str]:
    """A digest of all values, and the quality that worker 0 prints."""
    with started(engine, folder, REQUEST) as job:
        job.end()
        text = job.output()
    [(digest, names)] = re.findall(r"WIDE&DEEP (\w+) of (.*)", text)
    assert "'deep.ids', 'deep.weight'" in names
    [quality] = re.findall(r"AUC ([\d.]+)", text)
    return digest, quality


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return trained("fleetrun", tmp_path_factory.mktemp("fleetrun"))


@pytest.mark.parametrize("engine", ENGINES)
def test_wide_deep_ends_with_the_bits_of_fleetrun(
    engine: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    if (why := harness(engine).obstacle()) is not None:
        pytest.skip(why)
    assert trained(engine, tmp_path) == expected
