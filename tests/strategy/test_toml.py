# SPDX-License-Identifier: Apache-2.0
"""Strategies as TOML files."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import refuses

from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.settings import Rules, Settings, rules_of
from fleetlight.strategy.toml import dumps


def values_of(rules: Rules) -> st.SearchStrategy[Any]:
    """Values that a field accepts, by its own rules."""
    if rules.choices:
        return st.sampled_from(rules.choices)
    if rules.kind is list:
        inner = dataclasses.replace(rules, kind=rules.item)
        return st.lists(values_of(inner), min_size=int(rules.filled))
    if rules.kind is bool:
        return st.booleans()
    if rules.kind is int:
        most = None if rules.maximum is None else int(rules.maximum)
        return st.integers(min_value=int(rules.minimum or 0), max_value=most)
    if rules.kind is float:
        return floats_of(rules)
    assert rules.kind is str
    return st.text()


def floats_of(rules: Rules) -> st.SearchStrategy[float]:
    """Positive numbers that the rules accept."""
    most = rules.maximum if rules.below is None else rules.below
    bounds = {"exclude_min": True, "exclude_max": rules.below is not None}
    return st.floats(0, most, allow_nan=False, allow_infinity=False, **bounds)


def settings_for(settings: Settings) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments for any available settings."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for name, value in settings.items():
        rules = rules_of(settings, name)
        if isinstance(value, Settings):
            found[name] = settings_for(value)
        elif rules.available:
            found[name] = values_of(rules)
    return st.fixed_dictionaries({}, optional=found)


@settings(deadline=None)
@given(settings_for(DistributedStrategy()))
def test_a_written_strategy_is_read_back(settings_: dict[str, Any]) -> None:
    strategy = DistributedStrategy(**settings_)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "strategy.toml"
        strategy.to_file(file)
        assert DistributedStrategy.from_file(file) == strategy
        assert DistributedStrategy.from_file(str(file)) == strategy


def test_only_changed_settings_are_written() -> None:
    strategy = DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": 4}, deadline_s=60
    )
    assert dumps(strategy) == (
        "gradient_merge = true\ndeadline_s = 60.0\n\n[gradient_merge_configs]\nk_steps = 4\n"
    )
    assert dumps(DistributedStrategy()) == "\n"


def test_names_of_any_script_survive(tmp_path: Path) -> None:
    names = ['a"b', "läyer", "層", "😀", "\x7f", "\x01\n\\"]
    DistributedStrategy(recompute_configs={"checkpoints": names}).to_file(tmp_path / "s.toml")
    assert DistributedStrategy.from_file(tmp_path / "s.toml").recompute_configs.checkpoints == names


def test_a_handwritten_file_may_use_aliases_and_integers(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("fuse_grad_size_in_MB = 8  # MiB\n[exec_strategy]\nnum_threads = 2\n")
    strategy = DistributedStrategy.from_file(file)
    assert strategy.fuse_grad_size_in_MB == 8.0
    assert strategy.execution_strategy.num_threads == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", ["TOML"]),
        (b"amp is on", ["TOML"]),
        (b"amp = true\namp = false", ["TOML"]),
        (b"seed = " + b"9" * 5000, ["TOML"]),
        (b"ampp = true", ["'ampp'", "'amp'"]),
        (b"self = 1", ["'self'"]),
        (b"amp = 1", ["strategy.amp", "got 1 (int)", "bool"]),
        (b"[amp]\nx = 1", ["strategy.amp", "bool"]),
        (b"amp_configs = 3", ["strategy.amp_configs", "dict", "AmpConfigs"]),
        (b"[amp_configs]\ndtype = 'int8'", ["'int8'", "'bfloat16' or 'float16'"]),
        (b"seed = 1979-05-27", ["strategy.seed", "int"]),
    ],
)
def test_an_error_names_the_file_once(content: bytes, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_bytes(content)
    with refuses(StrategyError, *words) as caught:
        DistributedStrategy.from_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert str(caught.value).count("s.toml") == 1


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with refuses(StrategyError, "none.toml", "No such file"):
        DistributedStrategy.from_file(tmp_path / "none.toml")
    with refuses(StrategyError, str(tmp_path), "Is a directory"):
        DistributedStrategy.from_file(tmp_path)
