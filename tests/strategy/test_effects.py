# SPDX-License-Identifier: Apache-2.0
"""What `explain()` and `inert()` report, for each setting and kind of job."""

from typing import Any

import pytest

from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.effects import effect_of
from fleetlight.strategy.settings import Settings, rules_of

ONE = JobFacts()
FOUR = JobFacts(worker_num=4, node_num=2, backend="nccl")
SERVERS = JobFacts(is_collective=False, worker_num=4, server_num=2)
JOBS = [ONE, FOUR, SERVERS]


def effect(name: str, job: JobFacts = FOUR, **settings: Any) -> tuple[bool, str]:
    return effect_of(DistributedStrategy(**settings), name, job)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", DistributedStrategy().keys())
def test_every_field_has_an_explanation_in_every_job(name: str, job: JobFacts) -> None:
    active, why = effect(name, job)
    assert why
    rules = rules_of(DistributedStrategy(), name)
    assert rules.effect or issubclass(rules.kind, Settings), "it says what it does in no job"
    if not rules_of(DistributedStrategy(), name).available:
        assert (active, why) == (False, "not yet available in this version")


@pytest.mark.parametrize(
    ("settings", "name", "sentence"),
    [
        ({}, "fuse_all_reduce_ops", "gradients travel in buckets"),
        ({"fuse_all_reduce_ops": False}, "fuse_all_reduce_ops", "every gradient travels alone"),
        ({"fuse_grad_size_in_MB": 8}, "fuse_grad_size_in_MB", "a bucket holds up to 8 MiB"),
        ({"fuse_grad_size_in_num": 9}, "fuse_grad_size_in_num", "holds up to 9 gradients"),
        ({}, "fuse_grad_size_in_num", "no limit on the gradients"),
        ({"nccl_comm_num": 2}, "nccl_comm_num", "take turns over 2 nccl process groups"),
        ({}, "sync_nccl_allreduce", "buckets overlap with backward"),
        ({"sync_nccl_allreduce": True}, "sync_nccl_allreduce", "finished before the next"),
        ({}, "fp16_allreduce", "gradients travel in their own type"),
        ({"fp16_allreduce": True}, "fp16_allreduce", "as float16"),
        ({"fp16_allreduce": "fp16"}, "fp16_allreduce", "as float16"),
        ({"fp16_allreduce": "bf16"}, "fp16_allreduce", "as bfloat16"),
        ({}, "sync_batch_norm", "every worker normalises by its own batch"),
        ({"sync_batch_norm": True}, "sync_batch_norm", "the batches of all workers"),
        ({}, "find_unused_parameters", "must take part in every backward"),
        ({"find_unused_parameters": True}, "find_unused_parameters", "looks for unused"),
        ({"gradient_scale": "sum"}, "gradient_scale", "the sum over the workers"),
    ],
)
def test_settings_of_the_reduction_take_effect_with_several_workers(
    settings: dict[str, Any], name: str, sentence: str
) -> None:
    active, why = effect(name, FOUR, **settings)
    assert active
    assert sentence in why
    assert effect(name, ONE, **settings) == (False, "one worker has no other to reduce with")
    active, why = effect(name, SERVERS, **settings)
    assert not active
    assert "parameter servers" in why


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fuse_grad_size_in_MB": 8}, "a bucket holds up to 8 MiB"),
        ({"find_unused_parameters": True}, "looks for unused"),
        ({"sync_batch_norm": True}, "the batches of all workers"),
        ({"fp16_allreduce": "bf16"}, "as bfloat16"),
    ],
)
def test_reduction_settings_take_effect_for_dense_allreduce(
    settings: dict[str, Any], sentence: str
) -> None:
    (name,) = settings
    dense = {"a_sync_configs": {"dense": "allreduce"}, **settings}
    active, why = effect(name, SERVERS, **dense)
    assert active
    assert sentence in why
    assert DistributedStrategy(**dense).inert(SERVERS) == []
    alone = JobFacts(is_collective=False, server_num=1)
    assert effect(name, alone, **dense) == (False, "one worker has no other to reduce with")


def test_process_groups_of_a_job_with_servers_depend_on_shared_memory() -> None:
    dense = {"a_sync_configs": {"dense": "allreduce"}, "nccl_comm_num": 2}
    got = effect("nccl_comm_num", SERVERS, **dense)
    assert got == (True, "2 process groups, used where shared memory is not")


@pytest.mark.parametrize("dense", ["servers", "allreduce"])
def test_gradient_scale_has_no_effect_with_servers(dense: str) -> None:
    strategy = DistributedStrategy(gradient_scale="sum", a_sync_configs={"dense": dense})
    (sentence,) = strategy.inert(SERVERS)
    assert sentence.startswith("strategy.gradient_scale = 'sum' has no effect: only a collective")


@pytest.mark.parametrize("name", ["fuse_grad_size_in_MB", "fuse_grad_size_in_num"])
def test_bucket_sizes_have_no_effect_without_fusion(name: str) -> None:
    active, why = effect(name, FOUR, fuse_all_reduce_ops=False)
    assert not active
    assert "fuse_all_reduce_ops is off" in why


def test_gradient_merge_needs_more_than_one_step() -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    assert effect("gradient_merge", ONE, **merge)[0]
    assert "4 backwards make one" in effect("gradient_merge", **merge)[1]
    assert effect("gradient_merge_configs", **merge)[0]
    assert effect("gradient_merge") == (True, "off: each backward makes a step")
    off = effect("gradient_merge_configs", gradient_merge_configs={"k_steps": 4})
    assert off == (False, "gradient_merge is off")
    pointless, why = effect("gradient_merge", gradient_merge=True)
    assert not pointless
    assert "nothing to merge" in why
    assert (
        "gradient_merge has no effect" in (effect("gradient_merge_configs", gradient_merge=True)[1])
    )


def test_amp_takes_effect_in_every_job() -> None:
    assert effect("amp") == (True, "off")
    assert effect("amp", ONE, amp=True) == (True, "autocast to bfloat16")
    half = {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 8}}
    assert effect("amp", SERVERS, **half) == (True, "autocast to float16")
    assert effect("amp_configs", **half)[0]
    assert effect("amp_configs", amp_configs={"dtype": "float16"}) == (False, "amp is off")
    assert effect("amp_configs", amp=True)[0]
    assert DistributedStrategy(**half).inert(ONE) == []
    for field in ("init_loss_scaling", "use_dynamic_loss_scaling"):
        assert effect(f"amp_configs.{field}", **half)[0]
        assert effect(f"amp_configs.{field}", amp=True) == (False, "bfloat16 needs no loss scale")


def test_recompute_needs_named_modules() -> None:
    named = {"recompute": True, "recompute_configs": {"checkpoints": ["layer1"]}}
    assert effect("recompute", ONE, **named) == (True, "the named modules store no activations")
    assert effect("recompute_configs", **named)[0]
    assert effect("recompute") == (True, "off")
    assert effect("recompute", recompute=True)[0] is False
    assert effect("recompute_configs", recompute_configs={"checkpoints": ["a"]})[0] is False


@pytest.mark.parametrize("job", JOBS)
def test_some_settings_take_effect_always_and_some_never(job: JobFacts) -> None:
    assert effect("seed", job, seed=3)[0]
    assert effect("deadline_s", job, deadline_s=3)[0]
    assert not effect("fetch_frequency", job, fetch_frequency=5)[0]
    active, why = effect("execution_strategy", job, exec_strategy={"num_threads": 4})
    assert not active
    assert "OMP_NUM_THREADS" in why


@pytest.mark.parametrize(
    "settings",
    [
        {"fuse_grad_size_in_MB": 8},
        {"nccl_comm_num": 2},
        {"sync_batch_norm": True},
        {"gradient_scale": "sum"},
        {"fp16_allreduce": "bf16"},
        {"find_unused_parameters": True},
    ],
)
def test_reduction_settings_have_no_effect_with_one_worker(settings: dict[str, Any]) -> None:
    strategy = DistributedStrategy(**settings)
    (name,) = settings
    (sentence,) = strategy.inert(ONE)
    assert sentence.startswith(f"strategy.{name} = ")
    assert sentence.endswith("has no effect: one worker has no other to reduce with")
    assert strategy.inert(FOUR) == []
    assert len(strategy.inert(SERVERS)) == 1


def test_defaults_are_not_reported() -> None:
    for job in JOBS:
        assert DistributedStrategy().inert(job) == []
        assert DistributedStrategy(amp=False, amp_configs={}).inert(job) == []


def test_each_field_of_a_nested_config_is_reported_separately() -> None:
    strategy = DistributedStrategy(
        exec_strategy={"num_threads": 4, "num_iteration_per_drop_scope": 5},
        gradient_merge_configs={"k_steps": 2},
    )
    merge, threads, scope = strategy.inert(FOUR)
    assert merge == (
        "strategy.gradient_merge_configs.k_steps = 2 has no effect: gradient_merge is off"
    )
    assert threads.startswith("strategy.execution_strategy.num_threads = 4 has no effect")
    assert scope.startswith("strategy.execution_strategy.num_iteration_per_drop_scope = 5 has no")


def test_an_effective_field_does_not_hide_an_inert_one() -> None:
    programs = JobFacts(has_programs=True)
    strategy = DistributedStrategy(
        execution_strategy={"num_threads": 2, "num_iteration_per_drop_scope": 5}
    )
    (sentence,) = strategy.inert(programs)
    assert sentence == (
        "strategy.execution_strategy.num_iteration_per_drop_scope = 5 has no effect: reference "
        "counts free memory at once, so there is no scope to drop"
    )
    reported = strategy.explain(programs).splitlines()
    assert (
        " * execution_strategy.num_threads = 2: operators of a program run on 2 threads" in reported
    )
    assert any(
        " ! execution_strategy.num_iteration_per_drop_scope = 5: " in line for line in reported
    )


FIELDS = [
    f"{name}.{field}"
    for name, value in DistributedStrategy().items()
    if isinstance(value, Settings)
    for field in value
]


@pytest.mark.parametrize("job", JOBS)
def test_every_field_of_a_nested_config_has_an_explanation(job: JobFacts) -> None:
    strategy = DistributedStrategy()
    for name in FIELDS:
        assert effect_of(strategy, name, job)[1], name


def test_explain_shows_what_was_changed() -> None:
    strategy = DistributedStrategy(
        sync_batch_norm=True,
        fetch_frequency=5,
        localsgd=False,
        shared_memory=True,
        amp_configs={"dtype": "bfloat16"},
    )
    head, *lines, others, _ = strategy.explain(FOUR).splitlines()
    assert head == "job: collective, 4 workers on 2 hosts, nccl"
    assert [line.split(": ")[0] for line in lines] == [
        # set to its default, and without effect
        "   localsgd = False",
        " * shared_memory = True",
        "   amp_configs.dtype = 'bfloat16'",
        " * sync_batch_norm = True",
        " ! fetch_frequency = 5",
    ]
    leaves = [name for name, value in strategy.items() if not isinstance(value, Settings)]
    count = len(leaves) + len(FIELDS) - len(lines)
    assert others == f"{count} settings with defaults: explain(all=True) shows them"


def test_explain_lists_settings_and_relevant_fields() -> None:
    strategy = DistributedStrategy(
        sync_batch_norm=True, fetch_frequency=5, amp=True, checkpoint_configs={"every_s": 9.0}
    )
    head, *lines, legend = strategy.explain(FOUR, all=True).splitlines()
    assert head == "job: collective, 4 workers on 2 hosts, nccl"
    named = [line[3:].split()[0] for line in lines]
    plain = [name for name, value in strategy.items() if not isinstance(value, Settings)]
    assert [name for name in named if name in plain] == plain
    folded = {name for name in named if name not in plain and "." not in name}
    assert folded == {name.split(".")[0] for name in FIELDS} - {"amp_configs", "checkpoint_configs"}
    assert {name for name in named if "." in name} == {
        name for name in FIELDS if name.startswith(("amp_configs.", "checkpoint_configs."))
    }
    assert " * sync_batch_norm = True: statistics over the batches of all workers" in lines
    assert any(line.startswith(" ! fetch_frequency = 5: ") for line in lines)
    assert " ! checkpoint_configs.every_s = 9.0: checkpoint is off" in lines
    assert "   checkpoint_configs.resume = False: checkpoint is off" in lines
    assert " * amp_configs.dtype = 'bfloat16': what autocast computes in" in lines
    assert "   amp_configs.init_loss_scaling = 65536.0: bfloat16 needs no loss scale" in lines
    assert (
        "   localsgd_configs (begin_step, optimizer_state, buffers, k_steps): localsgd is off"
        in (lines)
    )
    assert "   durability = 'none': a collective job has no parameter servers" in lines
    # a switch that is off changes nothing
    assert "   localsgd = False: off: workers synchronize at each step" in lines
    assert "   a_sync = False: a collective job has no parameter servers" in lines
    assert legend.startswith("* takes effect")


@pytest.mark.parametrize(
    ("settings", "active", "sentence"),
    [
        ({}, True, "sync: a step waits for the gradients of all workers"),
        ({"a_sync": True}, True, "async: a push is applied when it arrives"),
        ({"a_sync": True, "a_sync_configs": {"staleness": 3}}, True, "more than 3 steps ahead"),
        (
            {"a_sync": True, "a_sync_configs": {"k_steps": 40}},
            True,
            "exchange differences every 40 steps",
        ),
    ],
)
def test_modes_with_servers_are_explained(settings: Any, active: bool, sentence: str) -> None:
    got, why = effect("a_sync", SERVERS, **settings)
    assert got is active
    assert sentence in why
    assert effect("a_sync", FOUR, **settings)[0] is False


@pytest.mark.parametrize(
    ("a_sync", "configs", "sentences"),
    [
        (False, {"staleness": 2}, ["staleness = 2 has no effect: a_sync is off"]),
        (False, {"k_steps": 4}, ["k_steps = 4 has no effect: a_sync is off"]),
        (
            True,
            {"k_steps": 4, "max_merge": 2, "dense": "allreduce"},
            ["max_merge = 2 has no effect: k_steps makes it", "dense = 'allreduce' has no effect"],
        ),
        (
            True,
            {"cache_rows": 5, "max_merge": 2},
            ["cache_rows = 5 has no effect: only workers of GeoSGD"],
        ),
    ],
)
def test_inert_settings_of_the_exchange_are_reported(
    a_sync: bool, configs: Any, sentences: list[str]
) -> None:
    reported = DistributedStrategy(a_sync=a_sync, a_sync_configs=configs).inert(SERVERS)
    assert len(reported) == len(sentences)
    for got, sentence in zip(reported, sentences, strict=True):
        assert got.startswith(f"strategy.a_sync_configs.{sentence}")


def test_some_settings_of_the_exchange_apply_in_every_mode() -> None:
    configs = {"dense": "allreduce", "on_nonfinite": "skip", "table_wire": "bf16"}
    for a_sync in (False, True):
        assert DistributedStrategy(a_sync=a_sync, a_sync_configs=configs).inert(SERVERS) == []


@pytest.mark.parametrize(
    ("configs", "field", "sentence"),
    [
        ({"staleness": 3}, "staleness", "no worker gets more than 3 steps ahead of the slowest"),
        ({}, "staleness", "no bound on how far a worker may be ahead of the slowest"),
        ({}, "k_steps", "workers and servers exchange at every step"),
        ({"k_steps": 40}, "k_steps", "GeoSGD: workers and servers exchange every 40 steps"),
        ({"k_steps": 4, "cache_rows": 5000}, "cache_rows", "trains copies of up to 5,000 rows"),
        ({"send_queue_size": 2}, "send_queue_size", "pushes that may wait to be sent: 2"),
        ({"max_merge": 3}, "max_merge", "up to 3 queued pushes travel as one"),
        ({"table_wire": "int8"}, "table_wire", "travel as int8, unless a layer has its own"),
        ({}, "table_wire", "rows and gradients of tables travel as float32"),
        ({"table_dtype": "bf16"}, "table_dtype", "keep the weights of tables as bf16, unless"),
        ({"table_folder": "/mnt/ssd"}, "table_folder", "not in memory are in /mnt/ssd"),
        ({}, "table_folder", "beside the server's log, or in a temporary file"),
    ],
)
def test_fields_of_the_exchange_are_explained(configs: Any, field: str, sentence: str) -> None:
    active, why = effect(f"a_sync_configs.{field}", SERVERS, a_sync=True, a_sync_configs=configs)
    assert active
    assert sentence in why


def test_the_push_queue_is_explained_only_if_there_is_one() -> None:
    lines = DistributedStrategy(a_sync=True).explain(SERVERS, all=True).splitlines()
    (queue,) = [line for line in lines if "send_queue_size" in line]
    (merged,) = [line for line in lines if "max_merge" in line]
    assert queue.startswith("   a_sync_configs.send_queue_size = 4: not set: with dense parameters")
    assert merged == "   a_sync_configs.max_merge = 1: each push travels alone"
    for configs in ({"send_queue_size": 4}, {"max_merge": 2}, {"dense": "allreduce"}):
        active, why = effect(
            "a_sync_configs.send_queue_size", SERVERS, a_sync=True, a_sync_configs=configs
        )
        assert (active, why) == (True, "pushes that may wait to be sent: 4")


def test_via_has_no_effect_without_servers() -> None:
    saved = {"checkpoint": "ckpt", "checkpoint_configs": {"via": "worker0"}}
    assert effect("checkpoint_configs.via", SERVERS, **saved)[0]
    (sentence,) = DistributedStrategy(**saved).inert(FOUR)
    assert sentence.endswith("has no effect: a collective job has no tables")


def test_explain_names_the_kind_of_job() -> None:
    head = DistributedStrategy().explain(SERVERS).splitlines()[0]
    assert head == "job: parameter-server, 2 servers, 4 workers on 1 host, gloo"


def test_shared_memory_replaces_process_groups() -> None:
    one_host = JobFacts(worker_num=2)
    active, why = effect("nccl_comm_num", one_host, nccl_comm_num=2)
    assert not active
    assert "sum in shared memory, not through process groups" in why
    assert "gloo" not in effect("nccl_comm_num", one_host)[1]
    for job in (one_host, JobFacts(worker_num=4, node_num=2)):
        shared = {"shared_memory": job.node_num > 1}
        active, why = effect("nccl_comm_num", job, nccl_comm_num=2, **shared)
        assert (active, why) == (True, "buckets take turns over 2 gloo process groups")


#: workers of two hosts that train on CPUs
HOSTS = JobFacts(worker_num=4, node_num=2)


def test_hierarchical_allreduce_takes_effect_across_hosts() -> None:
    on = {"use_hierarchical_allreduce": True}
    off = (True, "off: all workers take part in one all-reduce")
    assert effect("use_hierarchical_allreduce", HOSTS) == off
    active, why = effect("use_hierarchical_allreduce", HOSTS, **on)
    assert active
    assert "workers of one host sum first" in why
    got = effect("hierarchical_allreduce_inter_nranks", HOSTS, **on)
    assert got == (True, "all workers of a host sum at once")
    two = {**on, "hierarchical_allreduce_inter_nranks": 2}
    active, why = effect("hierarchical_allreduce_inter_nranks", HOSTS, **two)
    assert (active, why) == (True, "up to 2 workers, all of one host, sum first")
    assert DistributedStrategy(**two).inert(HOSTS) == []
    assert DistributedStrategy(**two).inert(JobFacts(worker_num=4)) == []
    active, why = effect("nccl_comm_num", HOSTS, nccl_comm_num=2, **on)
    assert (active, why) == (True, "the leaders of the hosts have 2 process groups")


@pytest.mark.parametrize(
    ("job", "inner", "sentence"),
    [
        (ONE, 0, "one worker has no other to reduce with"),
        (SERVERS, 0, "gradients go to the parameter servers"),
        (FOUR, 0, "on GPUs NCCL finds its own way"),
        (JobFacts(worker_num=4), 0, "all workers are on one host"),
        (JobFacts(worker_num=4), 1, "all workers are on one host"),
        (JobFacts(worker_num=4), 4, "all workers are on one host"),
        (JobFacts(worker_num=2, node_num=2), 0, "every host has one worker"),
    ],
)
def test_hierarchical_allreduce_has_no_effect_without_inner_sums(
    job: JobFacts, inner: int, sentence: str
) -> None:
    settings = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": inner}
    first, *others = DistributedStrategy(**settings).inert(job)
    assert first.startswith("strategy.use_hierarchical_allreduce = True has no effect: ")
    assert sentence in first
    assert len(others) == (inner > 0)


def test_useless_inner_groups_are_reported() -> None:
    name = "hierarchical_allreduce_inter_nranks"
    assert effect(name, HOSTS, **{name: 2}) == (False, "use_hierarchical_allreduce is off")
    active, why = effect(name, HOSTS, **{"use_hierarchical_allreduce": True, name: 1})
    assert not active
    assert "a group of one has nothing to sum" in why


def test_hierarchical_allreduce_takes_effect_for_dense_allreduce() -> None:
    dense = {"use_hierarchical_allreduce": True, "a_sync_configs": {"dense": "allreduce"}}
    active, why = effect("use_hierarchical_allreduce", SERVERS, **dense)
    assert active
    assert "where workers share hosts" in why


def test_explain_names_the_deadline_in_force_and_its_source() -> None:
    job = JobFacts(worker_num=2, deadline_s=20.0, deadline_from="FLEET_DEADLINE_S")
    lines = DistributedStrategy().explain(job).splitlines()
    [line] = [line for line in lines if "deadline_s" in line]
    assert "20 s are in force, from FLEET_DEADLINE_S" in line
    # set too late: the value given to fleet.init counts
    active, why = effect("deadline_s", job, deadline_s=7)
    assert not active
    assert "in force are 20 s" in why
    assert effect("deadline_s", job, deadline_s=20)[0]


def test_the_checkpoint_folder_is_fixed_at_the_start_of_the_job() -> None:
    assert effect("checkpoint") == (True, "only the script saves")
    assert effect("checkpoint_configs", checkpoint_configs={"every_s": 9.0}) == (
        False,
        "checkpoint is off",
    )
    for job in JOBS:
        active, why = effect("checkpoint", job, checkpoint="ckpt")
        assert (active, "into ckpt" in why) == (True, True)
    running = JobFacts(deadline_s=3.0, checkpoint="ckpt")
    assert effect("checkpoint", running, checkpoint="ckpt")[0]
    active, why = effect("checkpoint", running, checkpoint="other")
    assert (active, "in force is 'ckpt'" in why) == (False, True)
    without = effect("checkpoint", JobFacts(deadline_s=3.0), checkpoint="ckpt")
    assert without[1].endswith("the job does not save")
