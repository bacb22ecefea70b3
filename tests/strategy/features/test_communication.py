# SPDX-License-Identifier: Apache-2.0
"""What `explain()` says about settings that reduce communication between hosts."""

import dataclasses
from typing import Any

import pytest

from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.effects import effect_of

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
