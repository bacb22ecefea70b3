# SPDX-License-Identifier: Apache-2.0
"""Conflicting settings give one error that names both, in any order."""

import itertools
from typing import Any

import pytest
from tests.errors import refuses

from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.feature import Conflicts

LOCAL = ("localsgd", "adaptive_localsgd", "diloco")
FLOAT16 = {"amp": True, "amp_configs": {"dtype": "float16"}}
BFLOAT16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
UNUSED = {"find_unused_parameters": True}

#: two conflicting settings, and their names in the error
EXCLUDING: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    **{
        f"{one}, {two}": ({one: True}, {two: True}, one, two)
        for one, two in itertools.combinations(LOCAL, 2)
    },
    **{f"{one}, dgc": ({one: True}, {"dgc": True}, one, "dgc") for one in LOCAL},
    **{
        f"{one}, batch norm": ({one: True}, {"sync_batch_norm": True}, one, "sync_batch_norm")
        for one in LOCAL
    },
    **{
        f"{one}, sum": ({one: True}, {"gradient_scale": "sum"}, one, "gradient_scale = 'sum'")
        for one in LOCAL
    },
    **{
        f"{one}, float16": ({one: True}, FLOAT16, one, "amp_configs.dtype = 'float16'")
        for one in LOCAL
    },
    "two codecs": ({"compression": "bf16"}, {"fp16_allreduce": True}, "compression", "fp16_allr"),
    "dgc, codec": ({"dgc": True}, {"compression": "fp16"}, "dgc", "compression"),
    "dgc, fp16": ({"dgc": True}, {"fp16_allreduce": "bf16"}, "dgc", "fp16_allreduce"),
    "dgc, float16": ({"dgc": True}, FLOAT16, "dgc", "amp_configs.dtype = 'float16'"),
    "int8, float16": ({"compression": "int8"}, FLOAT16, "compression = 'int8'", "amp_configs"),
    "topk, float16": ({"compression": "topk"}, FLOAT16, "'topk'", "amp_configs.dtype"),
    "dgc, unused": ({"dgc": True}, UNUSED, "dgc", "find_unused_parameters"),
    "int8, unused": ({"compression": "int8"}, UNUSED, "'int8'", "find_unused_parameters"),
    "topk, unused": ({"compression": "topk"}, UNUSED, "'topk'", "find_unused_parameters"),
}


def test_conflicts_name_settings_that_exist() -> None:
    strategy = DistributedStrategy()
    conflicts = [one for base in DistributedStrategy.__mro__ for one in conflicts_in(base)]
    assert conflicts
    for conflict in conflicts:
        assert not conflict.first.holds(strategy)
        assert not conflict.second.holds(strategy)


def conflicts_in(feature: type) -> Conflicts:
    return vars(feature).get("CONFLICTS", ())


@pytest.mark.parametrize("case", EXCLUDING)
def test_conflicting_settings_are_refused(case: str) -> None:
    first, second, one, other = EXCLUDING[case]
    messages = []
    for settings in ({**first, **second}, {**second, **first}):
        strategy = DistributedStrategy()
        for name, value in settings.items():
            setattr(strategy, name, value)
        with refuses(StrategyError, one, other, "choose one") as caught:
            strategy.check()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    for alone in (first, second):
        DistributedStrategy(**alone).check()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"compression": "bf16", **FLOAT16}, id="a cast needs no unit"),
        pytest.param({"compression": "fp16", **UNUSED}, id="a cast owes nothing"),
        pytest.param({"compression": "int8", **BFLOAT16}, id="bfloat16 has no loss scale"),
        pytest.param({"localsgd": True, "compression": "topk"}, id="meetings may be compressed"),
        pytest.param({"diloco": True, "fp16_allreduce": True}, id="and narrow"),
        pytest.param({"dgc": True, "use_hierarchical_allreduce": True}, id="by levels"),
        pytest.param({"adaptive_localsgd": True, "gradient_merge": True}, id="and merged"),
        pytest.param({"localsgd": False, "diloco": True}, id="what is off is no conflict"),
    ],
)
def test_compatible_settings_are_accepted(settings: dict[str, Any]) -> None:
    for job in (JobFacts(), JobFacts(worker_num=4, node_num=2)):
        DistributedStrategy(**settings).check(job)


def test_init_k_steps_must_not_exceed_max_k_steps() -> None:
    configs = {"init_k_steps": 32}
    DistributedStrategy(adaptive_localsgd_configs=configs).check()
    strategy = DistributedStrategy(adaptive_localsgd=True, adaptive_localsgd_configs=configs)
    with refuses(StrategyError, "init_k_steps = 32", "max_k_steps = 16"):
        strategy.check()
    strategy.adaptive_localsgd_configs.max_k_steps = 32
    strategy.check()


def test_away_s_must_be_less_than_the_deadline() -> None:
    strategy = DistributedStrategy(durability="log", durability_configs={"away_s": 300})
    with refuses(StrategyError, "away_s = 300", "less than deadline_s = 300"):
        strategy.check()
    # the deadline of the job may come from another setting
    strategy.check(JobFacts(deadline_s=301.0))
    with refuses(StrategyError, "deadline_s = 20", "raise deadline_s or lower away_s"):
        DistributedStrategy(durability="log", durability_configs={"away_s": 20}).check(
            JobFacts(deadline_s=20.0)
        )
    DistributedStrategy(durability_configs={"away_s": 300}).check()


def test_the_default_of_away_s_stays_below_the_deadline() -> None:
    strategy = DistributedStrategy(durability="log", deadline_s=60)
    strategy.check()
    assert strategy.durability_configs.away_within(60.0) == 40.0
    assert strategy.durability_configs.away_within(300.0) == 120.0
    strategy.durability_configs.away_s = 50
    assert strategy.durability_configs.away_within(60.0) == 50.0
