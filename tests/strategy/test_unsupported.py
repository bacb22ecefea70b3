# SPDX-License-Identifier: Apache-2.0
"""Settings of other systems: every way to set one gives an error with advice."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refuses

import fleetlight as fleet
from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.unsupported import UNSUPPORTED, advice_on

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def rows() -> list[str]:
    """The table of the page; settings with equal advice share a row."""
    found: dict[str, list[str]] = {}
    for name, advice in UNSUPPORTED.items():
        found.setdefault(advice, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {advice} |" for advice, names in found.items()]


def test_every_way_to_set_an_unsupported_setting_gives_advice(tmp_path: Path) -> None:
    file = tmp_path / "strategy.toml"
    file.write_text("lars = true\n")
    strategy: Any = DistributedStrategy()
    words = ("strategy", "'lars'", "fleet.optim.Lars(")
    for use in (
        lambda: DistributedStrategy(lars=True),
        lambda: setattr(strategy, "lars", True),
        lambda: strategy.__setitem__("lars", True),
        lambda: strategy["lars"],
        lambda: DistributedStrategy.from_file(file),
    ):
        with refuses(StrategyError, *words):
            use()
    with refuses(AttributeError, *words):
        strategy.lars.anything = 3


def test_unsupported_settings_of_nested_configs_have_own_advice(tmp_path: Path) -> None:
    file = tmp_path / "strategy.toml"
    file.write_text("[a_sync_configs]\nmax_merge_var_num = 1\n")
    configs: Any = {"max_merge_var_num": 1}
    for use in (
        lambda: DistributedStrategy(a_sync_configs=configs),
        lambda: setattr(DistributedStrategy().a_sync_configs, "max_merge_var_num", 1),
        lambda: DistributedStrategy.from_file(file),
    ):
        with refuses(StrategyError, "'max_merge_var_num'", "strategy.a_sync_configs.max_merge"):
            use()


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_an_unsupported_setting_is_absent_and_its_advice_short(path: str) -> None:
    owner, _, name = path.rpartition(".")
    settings: Any = attrgetter(owner)(DistributedStrategy()) if owner else DistributedStrategy()
    assert name not in {*settings.keys(), *settings.ALIASES}
    with refuses(StrategyError, UNSUPPORTED[path]):
        setattr(settings, name, True)
    assert len(UNSUPPORTED[path].split()) <= 20


def test_advice_names_existing_settings_and_functions() -> None:
    text = " ".join(UNSUPPORTED.values())
    for path in re.findall(r"strategy\.([\w.]*\w)", text):
        attrgetter(path)(DistributedStrategy())
    for path in re.findall(r"fleet\.([\w.]*\w)", text):
        assert attrgetter(path)(fleet), path


def test_an_unknown_name_gets_suggestions_or_a_short_line() -> None:
    assert advice_on("strategy.a_synk") is None
    with refuses(StrategyError, "'a_synk'", "'a_sync'"):
        DistributedStrategy(a_synk=True)
    with refuses(StrategyError, "'zzz'", "print(strategy.explain(") as message:
        DistributedStrategy(zzz=True)
    assert len(str(message.value)) < 120


def test_the_migration_page_lists_all_unsupported_settings() -> None:
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## Settings of other systems")
    table, _, _ = table.partition("\n## ")
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows()
