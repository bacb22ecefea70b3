# SPDX-License-Identifier: Apache-2.0
"""Writes `strategy/config_dicts.py` from the fields: `python -m tests.strategy.written_dicts`."""

import dataclasses
from pathlib import Path

from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.settings import Settings

FILE = Path(__file__).parents[2] / "src" / "fleetlight" / "strategy" / "config_dicts.py"
_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The nested configs as dicts, for type checkers and editors.

`python -m tests.strategy.written_dicts` writes this file from the fields of the configs.
"""

from __future__ import annotations

from typing import TypedDict
'''


def written() -> str:
    """The content that the file must have."""
    configs = [value for _, value in DistributedStrategy().items() if isinstance(value, Settings)]
    return _HEAD + "".join(map(_written, sorted(configs, key=lambda one: type(one).__name__)))


def _written(config: Settings) -> str:
    fields = "".join(f"    {field.name}: {field.type}\n" for field in dataclasses.fields(config))
    return (
        f"\n\nclass {type(config).__name__}Dict(TypedDict, total=False):\n"
        f'    """The settings of `{config.DOTTED_NAME}`."""\n\n{fields}'
    )


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
