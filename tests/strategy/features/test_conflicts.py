# SPDX-License-Identifier: Apache-2.0
"""Conflicting settings give one error that names both, in any order."""

import dataclasses
import itertools
from typing import Any

import pytest
from tests.errors import refuses

from fleetlight import strategy
from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.effects import effect_of
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


# -- what `explain()` says about settings that reduce communication between hosts


ONE = JobFacts()
#: workers of one host, which sum in shared memory
HOST = JobFacts(worker_num=4)
HOSTS = JobFacts(worker_num=4, node_num=2)
#: workers of one host with GPUs
GPUS = JobFacts(worker_num=4, backend="nccl")
SERVERS = JobFacts(is_collective=False, worker_num=4, server_num=2)

#: a setting of each kind, and its effect between hosts
CODED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"compression": "fp16"}, "gradients cross between hosts as float16"),
    "bf16": ({"compression": "bf16"}, "gradients cross between hosts as bfloat16"),
    "int8": ({"compression": "int8"}, "as int8, with a scale for every block"),
    "topk": ({"compression": "topk"}, "the 1 % that are largest cross between hosts"),
    "2 %": (
        {"compression": "topk", "compression_configs": {"ratio": 0.02}},
        "the 2 % that are largest",
    ),
    "dgc": ({"dgc": True}, "the largest 0.1 % of the gradients are sent"),
    "last": ({"dgc": True, "dgc_configs": {"sparsity": [0.75, 0.96]}}, "the largest 4 %"),
    "older": ({"fp16_allreduce": "bf16"}, "as bfloat16"),
}
ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "localsgd": (
        {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 100}},
        "parameters are averaged every 4 steps, from step 101 on",
    ),
    "adaptive": (
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
        "every 2 steps at first, then as the loss falls, at most every 16",
    ),
    "diloco": ({"diloco": True}, "an outer step every 500 steps"),
    "diloco, 1": ({"diloco": True, "diloco_configs": {"k_steps": 1}}, "an outer step every 1 step"),
}


def effect(settings: dict[str, Any], job: JobFacts, name: str = "") -> tuple[bool, str]:
    return effect_of(DistributedStrategy(**settings), name or next(iter(settings)), job)


@pytest.mark.parametrize("case", CODED)
def test_compression_takes_effect_across_a_link(case: str) -> None:
    settings, sentence = CODED[case]
    active, why = effect(settings, HOSTS)
    assert active
    assert sentence in why
    assert DistributedStrategy(**settings).inert(HOSTS) == []
    active, why = effect(settings, HOST)
    assert not active
    assert "all workers are on one host" in why
    assert effect({**settings, "shared_memory": False}, HOST)[0]
    assert effect(settings, ONE) == (False, "one worker has no other to reduce with")
    assert "parameter servers" in effect(settings, SERVERS)[1]
    dense = {**settings, "a_sync_configs": {"dense": "allreduce"}}
    assert effect(dense, SERVERS)[0] is ("dgc" not in settings)


@pytest.mark.parametrize("case", CODED)
def test_configs_have_no_effect_without_their_setting(case: str) -> None:
    settings, _ = CODED[case]
    for name in settings:
        active, _ = effect(settings, HOST, name)
        assert not active
    for name in ("compression_configs", "dgc_configs"):
        assert effect({name: {"min_size": 5}}, HOSTS)[0] is False


def test_on_gpus_of_one_host_only_casts_take_effect() -> None:
    for form, active in (("fp16", True), ("bf16", True), ("int8", False), ("topk", False)):
        assert effect({"compression": form}, GPUS)[0] is active
        found = effect({"compression": form, "shared_memory": False}, GPUS)
        assert found[0]
        assert "cross between workers" in found[1]
    assert effect({"fp16_allreduce": True}, GPUS)[0]
    assert not effect({"dgc": True}, GPUS)[0]


@pytest.mark.parametrize("case", CODED)
def test_on_gpus_only_coded_gradients_take_levels(case: str) -> None:
    settings, _ = CODED[case]
    configured = {"use_hierarchical_allreduce": True, **settings}
    coded = case not in ("fp16", "bf16", "older")
    active, why = effect(configured, dataclasses.replace(GPUS, node_num=2))
    assert active is coded
    assert ("NCCL finds its own way" in why) is not coded


def test_dgc_is_for_collective_jobs() -> None:
    active, why = effect({"dgc": True, "a_sync_configs": {"dense": "allreduce"}}, SERVERS)
    assert not active
    assert why.startswith("it is for collective jobs")


def test_one_setting_decides_the_codec() -> None:
    for name in ("compression", "fp16_allreduce"):
        assert effect({}, HOSTS, name) == (True, "gradients travel in their own type")
    assert effect({"fp16_allreduce": True}, HOSTS, "compression") == (
        True,
        "as fp16_allreduce says",
    )
    assert effect({"compression": "bf16"}, HOSTS, "fp16_allreduce") == (True, "as compression says")
    assert effect({"dgc": True}, HOSTS, "compression") == (True, "as dgc says")


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression_configs_have_no_effect_on_casts(compression: str) -> None:
    settings = {"compression": compression, "compression_configs": {"ratio": 0.5}}
    (sentence,) = DistributedStrategy(**settings).inert(HOSTS)
    assert sentence.endswith("they are for compression = 'int8' or 'topk'")


def test_the_ratio_has_no_effect_on_int8() -> None:
    configs = {"ratio": 0.5, "min_size": 8}
    (sentence,) = DistributedStrategy(compression="int8", compression_configs=configs).inert(HOSTS)
    assert sentence == (
        "strategy.compression_configs.ratio = 0.5 has no effect: it is for compression = 'topk'; "
        "int8 sends all values"
    )
    assert DistributedStrategy(compression="topk", compression_configs=configs).inert(HOSTS) == []


def test_rampup_has_no_effect_with_one_sparsity() -> None:
    settings = {"dgc": True, "dgc_configs": {"rampup_step": 9}}
    (sentence,) = DistributedStrategy(**settings).inert(HOSTS)
    assert sentence.startswith("strategy.dgc_configs.rampup_step = 9 has no effect: sparsity has")
    settings["dgc_configs"] = {"rampup_step": 9, "sparsity": [0.9, 0.99]}
    assert DistributedStrategy(**settings).inert(HOSTS) == []


@pytest.mark.parametrize("case", ALONE)
def test_local_training_takes_effect_with_several_workers(case: str) -> None:
    settings, sentence = ALONE[case]
    active, why = effect(settings, HOSTS)
    assert active
    assert sentence in why
    # local training also reduces waiting, so it counts on one host
    assert DistributedStrategy(**settings).inert(HOST) == []
    assert effect(settings, ONE) == (False, "the job has one worker")
    active, why = effect(settings, SERVERS)
    assert not active
    assert "GeoSGD" in why
    configs = settings.get(f"{next(iter(settings))}_configs", {})
    assert len(DistributedStrategy(**settings).inert(SERVERS)) == 1 + len(configs)


@pytest.mark.parametrize("configured", [{"compression": "fp16"}, {"fp16_allreduce": True}], ids=str)
def test_movements_travel_as_bfloat16_in_place_of_float16(configured: dict[str, Any]) -> None:
    for settings, _ in ALONE.values():
        assert effect({**configured, **settings}, HOSTS, next(iter(configured)))[1].startswith(
            "as bfloat16"
        )
    # workers that average at every step send gradients, not movements
    assert effect({**configured, "localsgd": True}, HOSTS)[1].endswith("as float16")


@pytest.mark.parametrize(
    ("name", "configs"), [("localsgd", {"k_steps": 1}), ("adaptive_localsgd", {"max_k_steps": 1})]
)
def test_averaging_at_every_step_is_synchronous(name: str, configs: dict[str, int]) -> None:
    active, why = effect({name: True, f"{name}_configs": configs}, HOSTS)
    assert not active
    assert "averaging after each step is synchronous training" in why


@pytest.mark.parametrize("case", ["localsgd", "adaptive", "diloco", "dgc"])
def test_configs_follow_their_switch(case: str) -> None:
    settings, _ = {**ALONE, **CODED}[case]
    name = next(iter(settings))
    configs = f"{name}_configs"
    assert effect(settings, HOSTS, configs) == (True, f"as {name} says")
    assert effect({}, HOSTS, configs) == (False, f"{name} is off")
    assert effect({}, HOSTS, name)[1].startswith("off: ")


# -- limits of nested configs that the general rules do not show


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (strategy.ASyncConfigs, "k_steps", -1),
        (strategy.ASyncConfigs, "staleness", -1),
        (strategy.ASyncConfigs, "send_queue_size", 0),
        (strategy.ASyncConfigs, "max_merge", 0),
        (strategy.LocalSGDConfigs, "k_steps", 0),
        (strategy.LocalSGDConfigs, "begin_step", -1),
        (strategy.LocalSGDConfigs, "optimizer_state", "drop"),
        (strategy.LocalSGDConfigs, "buffers", "keep"),
        (strategy.AdaptiveLocalSGDConfigs, "init_k_steps", 0),
        (strategy.AdaptiveLocalSGDConfigs, "max_k_steps", 0),
        (strategy.DiLoCoConfigs, "k_steps", 0),
        (strategy.DiLoCoConfigs, "outer_lr", 0.0),
        (strategy.DiLoCoConfigs, "outer_momentum", -0.1),
        (strategy.DiLoCoConfigs, "outer_momentum", 1.1),
        (strategy.DGCConfigs, "rampup_begin_step", -1),
        (strategy.DGCConfigs, "rampup_step", 0),
        (strategy.DGCConfigs, "sparsity", ["0.9"]),
        (strategy.DGCConfigs, "sparsity", []),
        (strategy.DGCConfigs, "sparsity", [0.5, 1.0]),
        (strategy.DGCConfigs, "sparsity", [-0.1]),
        (strategy.DGCConfigs, "sparsity", [float("nan")]),
        (strategy.DGCConfigs, "local_grad_clip_norm", 0),
        (strategy.DGCConfigs, "min_size", 0),
        (strategy.CompressionConfigs, "ratio", 0),
        (strategy.CompressionConfigs, "ratio", 1.1),
        (strategy.CompressionConfigs, "min_size", 0),
        (strategy.CompressionConfigs, "exclude", "layer1"),
        (strategy.GradientMergeConfigs, "k_steps", 0),
        (strategy.GradientMergeConfigs, "avg", 1),
        (strategy.AmpConfigs, "dtype", "float32"),
        (strategy.AmpConfigs, "init_loss_scaling", 0.0),
        (strategy.AmpConfigs, "use_dynamic_loss_scaling", 1),
        (strategy.RecomputeConfigs, "checkpoints", "layer1"),
        (strategy.RecomputeConfigs, "checkpoints", [1]),
        (strategy.CheckpointConfigs, "every_s", -1.0),
        (strategy.CheckpointConfigs, "every_steps", -1),
        (strategy.CheckpointConfigs, "via", "worker1"),
        (strategy.CheckpointConfigs, "grace_s", 0.0),
        (strategy.CheckpointConfigs, "resume", "yes"),
        (strategy.ExecutionStrategy, "num_threads", 0),
        (strategy.ExecutionStrategy, "num_iteration_per_drop_scope", 0),
    ],
)
def test_values_out_of_range_are_refused(config: Any, name: str, value: object) -> None:
    with refuses(StrategyError, f"{config.DOTTED_NAME}.{name}"):
        config(**{name: value})
