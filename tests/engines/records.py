# SPDX-License-Identifier: Apache-2.0
"""The records that the workers of `patient.py` have trained on, over all starts of a job."""

import collections
import json
from pathlib import Path

RECORDS = 64


def trained(folder: Path) -> dict[int, collections.Counter[int]]:
    """By epoch: how often each record was part of a step."""
    epochs: dict[int, collections.Counter[int]] = {}
    for file in folder.glob("worker.*"):
        for line in file.read_text().splitlines():
            _, epoch, ids = line.split(" ", 2)
            epochs.setdefault(int(epoch), collections.Counter()).update(json.loads(ids))
    return epochs


def lost_and_doubled(folder: Path) -> tuple[int, int]:
    """How many records some epoch lacks, and how many it has too often."""
    lost = doubled = 0
    for epoch in trained(folder).values():
        lost += sum(epoch[record] == 0 for record in range(RECORDS))
        doubled += sum(count - 1 for count in epoch.values())
    return lost, doubled


def steps(folder: Path) -> int:
    """How many steps the workers have logged."""
    return sum(len(file.read_text().splitlines()) for file in folder.glob("worker.*"))
