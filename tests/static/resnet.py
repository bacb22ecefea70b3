# SPDX-License-Identifier: Apache-2.0
"""The ResNet-50 of the examples, captured."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight import static

_FILE = Path(__file__).parents[2] / "examples/resnet50/model.py"


def resnet50(classes: int = 10) -> nn.Module:
    """A ResNet-50 with 161 parameters."""
    spec = importlib.util.spec_from_file_location("resnet50_model", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.ResNet50(classes)


def images(seed: int, count: int = 4, size: int = 32) -> dict[str, Tensor]:
    """Small images in double precision."""
    torch.manual_seed(seed)
    return {"x": torch.randn(count, 3, size, size).double(), "y": torch.randint(0, 10, (count,))}


@functools.cache
def captured_resnet50() -> static.Program:
    """In float32, so that buckets have their usual sizes; only its graph is used."""
    model = resnet50(1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    feed = {"x": images(0)["x"].float(), "y": images(0)["y"]}
    return static.capture(model, nn.functional.cross_entropy, optimizer, feed)
