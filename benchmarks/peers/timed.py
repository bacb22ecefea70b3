# SPDX-License-Identifier: Apache-2.0
"""Helpers of the programs in this folder, for any of their interpreters: NumPy only."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CLASSES = 10
SHAPES = {"mlp": (1, 28, 28), "resnet50": (3, 32, 32), "resnet50_224": (3, 224, 224)}
BATCH = {"mlp": 64, "resnet50": 8, "resnet50_224": 8}
Batch = tuple[Any, Any]


def arguments(*systems: str) -> argparse.Namespace:
    """The options every program takes; `systems` where one file holds several."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=3)
    if systems:
        parser.add_argument("--system", choices=systems, required=True)
    return parser.parse_args()


def batches(model: str, rank: int, count: int = 8) -> list[Batch]:
    """One worker's synthetic images and labels."""
    random, batch = np.random.default_rng(1 + rank), BATCH[model]
    return [
        (
            random.random((batch, *SHAPES[model]), dtype=np.float32),
            random.integers(0, CLASSES, batch),
        )
        for _ in range(count)
    ]


def train(
    options: argparse.Namespace,
    step: Callable[[Any, Any], float],
    data: list[Batch],
    parameters: Callable[[], float],
    **facts: Any,
) -> None:
    """Warm up, time `options.steps` steps, and print the line the harness reads.

    `step` returns the loss as a number, so no system can leave work undone behind the clock.
    """
    for number in range(options.warmup):
        step(*data[number % len(data)])
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(options.steps):
        loss = step(*data[number % len(data)])
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    facts |= {"steps": options.steps, "seconds": seconds, "cpu_seconds": cpu_seconds}
    print("RESULT " + json.dumps({**facts, "loss": loss, "parameters": parameters()}), flush=True)
