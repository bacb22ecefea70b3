# SPDX-License-Identifier: Apache-2.0
"""The device of an executor, in all notations."""

from __future__ import annotations

from typing import Any

import torch

from fleetlight.errors import ConfigError

_EXPECTED = "expected 'cpu', 'cuda', 'cuda:1', a torch.device, or the number of a GPU"


def place_of(place: Any) -> torch.device:
    """The device; an error if it is invalid or missing on this machine."""
    device = _device(place)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(
                f"Executor: got the place {place!r}, but torch sees no GPU on this machine; use "
                "'cpu', or a build of torch for its GPU"
            )
        if (device.index or 0) >= count:
            raise ConfigError(
                f"Executor: got the place {place!r}, expected a GPU from 0 to {count - 1}: torch "
                f"sees {count} on this machine"
            )
    return device


def _device(place: Any) -> torch.device:
    if isinstance(place, int) and not isinstance(place, bool) and place >= 0:
        return torch.device("cuda", place)
    if not isinstance(place, (str, torch.device)):
        raise ConfigError(f"Executor: got the place {place!r}, {_EXPECTED}")
    try:
        # Paddle calls it gpu
        return torch.device(place.replace("gpu", "cuda", 1) if isinstance(place, str) else place)
    except RuntimeError:
        raise ConfigError(f"Executor: got the place {place!r}, {_EXPECTED}") from None
