# SPDX-License-Identifier: Apache-2.0
"""The settings for slow networks that benchmarks compare, by their names on result pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

LEVELS: Settings = {"use_hierarchical_allreduce": True}
INT8: Settings = {"compression": "int8"}
TOPK: Settings = {"compression": "topk", "compression_configs": {"ratio": 0.01}}
DGC: Settings = {"dgc": True, "dgc_configs": {"sparsity": [0.999]}}


def narrow(kind: str) -> Settings:
    """Gradients as "bf16" or "fp16"."""
    return {"compression": kind}


def localsgd(k: int) -> Settings:
    """Parameters averaged every k steps, from the first step on."""
    return {"localsgd": True, "localsgd_configs": {"k_steps": k, "begin_step": 0}}


def diloco(k: int, **outer: float) -> Settings:
    """An outer step every k steps, from the first step on."""
    return {"diloco": True, "diloco_configs": {"k_steps": k, "begin_step": 0, **outer}}


def both(*of: Settings) -> dict[str, Any]:
    """Several settings together."""
    return {name: value for settings in of for name, value in settings.items()}
