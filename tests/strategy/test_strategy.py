# SPDX-License-Identifier: Apache-2.0
"""`DistributedStrategy`: its public fields, and every way to set them."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refuses

import fleetlight as fleet
from fleetlight.errors import StrategyError
from fleetlight.strategy import (
    DistributedStrategy,
    ExecutionStrategy,
    GradientMergeConfigs,
    LocalSGDConfigs,
)
from fleetlight.strategy.settings import Settings, default_of, rules_of
from fleetlight.strategy.strategy import variables_of

FIELDS = {
    "a_sync": False,
    "localsgd": False,
    "adaptive_localsgd": False,
    "diloco": False,
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 25.0,
    "fuse_grad_size_in_num": 0,
    "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 0,
    "nccl_comm_num": 1,
    "shared_memory": True,
    "sync_nccl_allreduce": False,
    "gradient_merge": False,
    "fp16_allreduce": False,
    "compression": "none",
    "dgc": False,
    "amp": False,
    "recompute": False,
    "sync_batch_norm": False,
    "broadcast_buffers": True,
    "find_unused_parameters": False,
    "gradient_scale": "mean",
    "fetch_frequency": 1,
    "durability": "none",
    "lost_worker": "fail",
    "checkpoint": "",
    "ssl": None,
    "seed": 0,
    "worker_seeds": "distinct",
    "sinks": "",
    "sinks_every_s": 10.0,
    "deadline_s": 300.0,
}
AVERAGING = {"begin_step", "optimizer_state", "buffers"}
CONFIGS = {
    "a_sync_configs": {
        "k_steps",
        "staleness",
        "send_queue_size",
        "max_merge",
        "dense",
        "on_nonfinite",
        "cache_rows",
        "table_wire",
        "table_dtype",
        "table_folder",
    },
    "localsgd_configs": AVERAGING | {"k_steps"},
    "adaptive_localsgd_configs": AVERAGING | {"init_k_steps", "max_k_steps"},
    "diloco_configs": AVERAGING | {"k_steps", "outer_lr", "outer_momentum"},
    "gradient_merge_configs": {"k_steps", "avg"},
    "compression_configs": {"ratio", "error_feedback", "min_size", "exclude"},
    "dgc_configs": {
        "rampup_begin_step",
        "rampup_step",
        "sparsity",
        "local_grad_clip_norm",
        "factor_masking",
        "min_size",
        "exclude",
    },
    "amp_configs": {"dtype", "init_loss_scaling", "use_dynamic_loss_scaling"},
    "recompute_configs": {"checkpoints"},
    "execution_strategy": {"num_threads", "num_iteration_per_drop_scope"},
    "checkpoint_configs": {
        "every_s",
        "every_steps",
        "via",
        "grace_s",
        "keep",
        "base_every",
        "resume",
    },
    "ssl_configs": {"expiry_warning_days"},
    "durability_configs": {"folder", "sync", "snapshot_s", "snapshot_mb", "away_s", "resume"},
}

#: settings that are not yet available
UNAVAILABLE: set[str] = set()


def settings_of(settings: Settings, prefix: str = "") -> dict[str, bool]:
    """Every setting, nested ones with a dot, and whether it is available."""
    found: dict[str, bool] = {}
    for name, value in settings.items():
        if isinstance(value, Settings):
            found |= settings_of(value, f"{name}.")
        else:
            found[prefix + name] = rules_of(settings, name).available
    return found


def test_the_strategy_has_exactly_the_public_fields() -> None:
    strategy = DistributedStrategy()
    assert set(strategy.keys()) == set(FIELDS) | set(CONFIGS)
    assert {name: getattr(strategy, name) for name in FIELDS} == FIELDS
    for name, inner in CONFIGS.items():
        assert set(getattr(strategy, name).keys()) == inner


def test_every_field_is_documented() -> None:
    strategy = DistributedStrategy()
    for settings in (strategy, *(getattr(strategy, name) for name in CONFIGS)):
        for name in settings.keys():  # noqa: SIM118
            assert rules_of(settings, name).doc


def test_the_pages_list_every_field_with_its_default() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "reference" / "settings.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(DistributedStrategy().keys())
    for name, default in FIELDS.items():
        default_text = repr(default).replace("'", '"')
        assert f"Default: `{default_text}`." in sections[name]
        unavailable = rules_of(DistributedStrategy(), name).available is False
        assert ("Not yet available." in sections[name]) == unavailable
    for name, inner in CONFIGS.items():
        for key in inner:
            default_text = repr(getattr(DistributedStrategy(), name)[key]).replace("'", '"')
            assert re.search(
                rf"^- `{key}`: .*Default: `{re.escape(default_text)}`", sections[name], re.M
            )
    shown = (docs / "strategy.md").read_text(encoding="utf-8")
    for names in (DistributedStrategy.ALIASES.items(), variables_of(DistributedStrategy).items()):
        for other, name in names:
            assert f"| `{other}` | `{name}`" in shown


def test_the_public_strategy_is_this_class() -> None:
    assert fleet.DistributedStrategy is DistributedStrategy


def test_the_order_of_settings_does_not_matter() -> None:
    settings: list[tuple[str, Any]] = [
        ("gradient_merge", True),
        ("gradient_merge_configs", {"k_steps": 4}),
        ("gradient_merge_configs", {"avg": False}),
        ("compression", "topk"),
        ("local_sgd_steps", 4),
    ]
    strategies = []
    for order in itertools.permutations(settings):
        strategy = DistributedStrategy()
        for name, value in order:
            setattr(strategy, name, value)
        strategies.append(strategy)
    expected = DistributedStrategy(
        localsgd_configs=LocalSGDConfigs(k_steps=4),
        compression="topk",
        gradient_merge_configs=GradientMergeConfigs(avg=False, k_steps=4),
        gradient_merge=True,
    )
    assert all(strategy == expected for strategy in strategies)


def test_aliases_set_their_targets() -> None:
    strategy: Any = DistributedStrategy()
    strategy.exec_strategy.num_threads = 3
    assert strategy.execution_strategy.num_threads == 3
    strategy.use_local_sgd, strategy.local_sgd_steps = True, 4
    strategy.local_sgd_is_warm_steps = 9
    assert strategy.localsgd
    assert strategy.localsgd_configs == LocalSGDConfigs(k_steps=4, begin_step=9)
    strategy.exec_strategy = ExecutionStrategy(num_threads=5)
    assert strategy.execution_strategy.num_threads == 5


def test_unknown_names_get_suggestions() -> None:
    with refuses(StrategyError, "'a_sync_config'", "'a_sync_configs'"):
        DistributedStrategy(a_sync_config={})
    with refuses(StrategyError, "'fuse_grad_size'", "'fuse_grad_size_in_MB'"):
        DistributedStrategy().fuse_grad_size = 3


@pytest.mark.parametrize("value", [False, True, "fp16", "bf16"])
def test_fp16_allreduce_accepts_switches_and_types(value: object) -> None:
    assert DistributedStrategy(fp16_allreduce=value).fp16_allreduce == value


@pytest.mark.parametrize("value", [1, 0, "bfloat16", None, "true"])
def test_fp16_allreduce_refuses_other_values(value: object) -> None:
    with refuses(StrategyError, "fp16_allreduce", f"{value!r}", "True", "'fp16'", "'bf16'"):
        DistributedStrategy(fp16_allreduce=value)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 1e300, None])
def test_a_deadline_is_finite(value: object) -> None:
    with refuses(StrategyError, "strategy.deadline_s"):
        DistributedStrategy(deadline_s=value)


def test_the_list_of_unavailable_settings_is_complete() -> None:
    everything = settings_of(DistributedStrategy())
    assert {name for name, available in everything.items() if not available} == UNAVAILABLE


def test_an_unavailable_setting_accepts_its_default() -> None:
    strategy = DistributedStrategy(
        a_sync=False, localsgd_configs=LocalSGDConfigs(), durability="none"
    )
    assert strategy == DistributedStrategy()


def test_flags_give_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_fuse_parameter_memory_size", "16")
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", "50")
    monkeypatch.setenv("FLAGS_sync_nccl_allreduce", "1")
    strategy = DistributedStrategy()
    assert strategy.fuse_grad_size_in_MB == 16.0
    assert strategy.fuse_grad_size_in_num == 50
    assert strategy.sync_nccl_allreduce is True
    assert not strategy.is_set("fuse_grad_size_in_MB")
    assert "fuse_grad_size_in_MB = 16.0 (from FLAGS_fuse_parameter_memory_size)" in (
        strategy.explain()
    )


def test_fleet_ssl_sets_the_certificate_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SSL", "/certs")
    assert DistributedStrategy().ssl == "/certs"
    assert "ssl = '/certs' (from FLEET_SSL)" in DistributedStrategy().explain()
    assert DistributedStrategy(ssl="mine").ssl == "mine"
    assert DistributedStrategy(ssl=None).ssl is None


def test_variables_of_fleetrun_set_ssl_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SSL_EXPIRY_WARNING_DAYS", "90")
    strategy = DistributedStrategy(ssl="certs")
    assert dict(strategy.ssl_configs.items()) == {"expiry_warning_days": 90}
    assert not strategy.is_set("ssl_configs")
    line = "ssl_configs.expiry_warning_days = 90 (from FLEET_SSL_EXPIRY_WARNING_DAYS)"
    assert line in strategy.explain()
    strategy.ssl_configs.expiry_warning_days = 7
    assert "ssl_configs.expiry_warning_days = 7: " in strategy.explain()
    assert "(from FLEET_SSL_EXPIRY" not in strategy.explain()
    monkeypatch.setenv("FLEET_SSL_EXPIRY_WARNING_DAYS", "soon")
    with refuses(StrategyError, "FLEET_SSL_EXPIRY_WARNING_DAYS='soon'", "environment"):
        DistributedStrategy()


@pytest.mark.parametrize(("text", "value"), [("0", False), ("True", True), ("false", False)])
def test_a_flag_may_be_a_switch(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_sync_nccl_allreduce", text)
    assert DistributedStrategy().sync_nccl_allreduce is value


@pytest.mark.parametrize("text", ["", " ", "-1", "-1.0"])
def test_empty_or_negative_flags_keep_defaults(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_fuse_parameter_memory_size", text)
    assert DistributedStrategy() == DistributedStrategy(fuse_grad_size_in_MB=25)
    assert "(from" not in DistributedStrategy().explain()


def test_script_settings_win_over_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLAGS_fuse_parameter_memory_size", "16")
    strategy = DistributedStrategy(fuse_grad_size_in_MB=8)
    assert strategy.fuse_grad_size_in_MB == 8
    assert "(from" not in strategy.explain()
    file = tmp_path / "strategy.toml"
    file.write_text("fuse_grad_size_in_MB = 4\n")
    assert DistributedStrategy.from_file(file).fuse_grad_size_in_MB == 4


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FLAGS_fuse_parameter_memory_size", "big"),
        ("FLAGS_fuse_parameter_memory_size", "0"),
        ("FLAGS_fuse_parameter_memory_size", "nan"),
        ("FLAGS_fuse_parameter_groups_size", "1.5"),
        ("FLAGS_sync_nccl_allreduce", "yes"),
    ],
)
def test_a_wrong_flag_is_named(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with refuses(StrategyError, f"{variable}='{text}'", "environment"):
        DistributedStrategy()


def test_every_default_passes_its_own_rules() -> None:
    for field in dataclasses.fields(DistributedStrategy):
        assert DistributedStrategy(**{field.name: default_of(field)}) == DistributedStrategy()


def test_errors_name_a_setting_as_scripts_write_it() -> None:
    strategy = DistributedStrategy()
    for name, value in strategy.items():
        if isinstance(value, Settings):
            assert f"strategy.{name}" == value.DOTTED_NAME
    with refuses(StrategyError, "strategy.localsgd_configs.k_steps", "got 0"):
        strategy.localsgd_configs.k_steps = 0
