# SPDX-License-Identifier: Apache-2.0
"""A feature is one file: a config, and a `Feature` among the bases of `DistributedStrategy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.errors import refuses

from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.feature import Checks, Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _toy(strategy: ToyFeature, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker has no peer to play with"
    return True, f"the workers play {strategy.toy_configs.rounds} rounds"


def _check_rounds(strategy: ToyFeature, job: JobFacts) -> None:
    if strategy.toy and strategy.toy_configs.rounds < job.worker_num:
        raise StrategyError("strategy.toy_configs: fewer rounds than workers")


@settings_class
class ToyConfigs(Settings):
    """How the workers play."""

    rounds: int = setting(3, "how many rounds", minimum=1, variable="FLEET_TOY_ROUNDS")


@settings_class
class ToyFeature(Feature):
    """Play between workers."""

    ALIASES: ClassVar = {"use_toy": "toy"}
    CONFLICTS: ClassVar[Conflicts] = (
        Conflict(Chosen("toy"), Chosen("amp_configs.dtype", ("float16",)), "toys need precision"),
    )
    CHECKS: ClassVar[Checks] = (_check_rounds,)

    toy: bool = setting(False, "the workers play", effect=_toy)
    toy_configs: Nested[ToyConfigs, dict[str, Any]] = nested(ToyConfigs, "how they play")


@settings_class
class ToyStrategy(ToyFeature, DistributedStrategy):
    """The strategy with one more feature."""


TWO = JobFacts(worker_num=2)


def test_toy_fields_follow_those_of_other_features() -> None:
    assert ToyStrategy().keys() == [*DistributedStrategy().keys(), "toy", "toy_configs"]
    assert repr(ToyStrategy(toy=True, amp=True)) == "ToyStrategy(amp=True, toy=True)"


def test_explain_shows_the_effect_of_a_new_feature() -> None:
    lines = ToyStrategy(toy=True).explain(TWO).splitlines()
    assert " * toy = True: the workers play 3 rounds" in lines
    everything = ToyStrategy(toy=True).explain(TWO, all=True).splitlines()
    assert " * toy_configs.rounds = 3: how many rounds" in everything
    off = ToyStrategy().explain(TWO, all=True).splitlines()
    assert "   toy_configs (rounds): toy is off" in off
    assert ToyStrategy(toy=True).inert(JobFacts()) == [
        "strategy.toy = True has no effect: one worker has no peer to play with"
    ]


def test_conflicts_and_checks_of_a_new_feature_are_checked() -> None:
    half = {"amp": True, "amp_configs": {"dtype": "float16"}}
    names = ("strategy.toy", "strategy.amp_configs.dtype = 'float16'")
    with refuses(StrategyError, *names, "toys need precision", "choose one"):
        ToyStrategy(toy=True, **half).check(TWO)
    # a field of a config counts only if its switch is on
    ToyStrategy(toy=True, amp_configs=half["amp_configs"]).check(TWO)
    with refuses(StrategyError, "fewer rounds than workers"):
        ToyStrategy(toy=True).check(JobFacts(worker_num=4))
    # conflicts of other features are still checked
    with refuses(StrategyError, "strategy.localsgd", "strategy.dgc", "choose one"):
        ToyStrategy(localsgd=True, dgc=True).check(TWO)


def test_a_new_feature_has_a_variable_an_alias_and_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLEET_TOY_ROUNDS", "5")
    strategy = ToyStrategy(use_toy=True)
    assert (strategy.toy, strategy.toy_configs.rounds) == (True, 5)
    assert "toy_configs.rounds = 5 (from FLEET_TOY_ROUNDS)" in strategy.explain(TWO)
    strategy.to_file(tmp_path / "toy.toml")
    monkeypatch.delenv("FLEET_TOY_ROUNDS")
    assert ToyStrategy.from_file(tmp_path / "toy.toml") == strategy
    with refuses(StrategyError, "'toys'", "'toy'"):
        ToyStrategy(toys=True)
