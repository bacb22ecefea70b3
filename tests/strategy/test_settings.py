# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the behaviour of every group of settings, shown with a small one."""

import copy
import dataclasses
import pickle
import re
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import refuses

import fleetlight as fleet
from fleetlight.errors import NotAvailableError, StrategyError
from fleetlight.strategy import DistributedStrategy, JobFacts, current_job, set_current_job
from fleetlight.strategy.settings import (
    Nested,
    Rules,
    Settings,
    nested,
    rules_of,
    setting,
    settings_class,
)
from fleetlight.strategy.toml import dumps
from fleetlight.strategy.unsupported import UNSUPPORTED, advice_on


@settings_class
class Inner(Settings):
    steps: int = setting(1, "how many", minimum=1)
    names: list[str] = setting([], "which")
    later: int = setting(0, "some day", available=False)


@settings_class
class Outer(Settings):
    DOTTED_NAME = "outer"
    ALIASES: ClassVar[dict[str, str]] = {"size": "megabytes", "inner_steps": "inner.steps"}

    on: bool = setting(False, "whether")
    megabytes: float = setting(25.0, "how much", above=0, maximum=1000)
    mode: str = setting("mean", "how", choices=("mean", "sum"))
    limit: int | None = setting(None, "at most", kind=int, optional=True, minimum=0)
    weights: list[float] = setting([1.0], "how heavy", item=float, above=0, below=9, filled=True)
    inner: Nested[Inner, dict[str, Any]] = nested(Inner, "more")


def test_keywords_attributes_and_items_are_equivalent() -> None:
    by_keyword = Outer(on=True, size=3, inner={"steps": 4})
    by_attribute = Outer()
    by_attribute.inner.steps = 4
    by_attribute.megabytes = 3
    by_attribute.on = True
    by_item = Outer()
    by_item["inner_steps"], by_item["size"], by_item["on"] = 4, 3, True
    assert by_keyword == by_attribute == by_item
    assert repr(by_keyword) == "Outer(on=True, megabytes=3.0, inner=Inner(steps=4))"


def test_settings_read_like_a_dict() -> None:
    settings = Outer(size=3)
    assert settings["megabytes"] == settings["size"] == 3
    assert settings["inner_steps"] == 1
    assert dict(settings) == dict(settings.items())
    assert "on" in settings
    assert "off" not in settings
    assert dict(Inner(steps=2).changed()) == {"steps": 2}
    for name in ("off", "items", "_set_names"):
        with refuses(StrategyError, "outer", f"'{name}'"):
            settings[name]


def test_an_alias_reads_and_writes_its_target() -> None:
    settings: Any = Outer()
    settings.inner_steps = 7
    assert settings.inner.steps == settings.inner_steps == 7
    assert settings.is_set("inner")


def test_a_dict_changes_only_the_keys_it_names() -> None:
    settings = Outer(inner={"steps": 3})
    settings.inner = {"names": ["a"]}
    assert (settings.inner.steps, settings.inner.names) == (3, ["a"])


def test_a_dict_with_an_error_changes_nothing() -> None:
    settings = Outer()
    with refuses(StrategyError, "outer.inner", "'step'"):
        settings.inner = {"steps": 3, "step": 4}
    assert settings == Outer()


@pytest.mark.parametrize("bad", [None, 3, "steps", [("steps", 1)], Outer()])
def test_a_nested_config_is_a_dict_or_its_class(bad: object) -> None:
    with refuses(StrategyError, "outer.inner", repr(bad), "dict", "Inner"):
        Outer(inner=bad)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("on", 1, ["got 1 (int)", "bool"]),
        ("on", "true", ["'true'", "bool"]),
        ("on", None, ["None", "bool"]),
        ("limit", True, ["got True (bool)", "int"]),
        ("limit", "2", ["got '2' (str)", "int"]),
        ("limit", 2.0, ["2.0", "int"]),
        ("limit", -1, ["at least 0"]),
        ("megabytes", "25", ["'25'", "float"]),
        ("megabytes", True, ["True", "float"]),
        ("megabytes", 0, ["more than 0"]),
        ("megabytes", 1001, ["at most 1000"]),
        ("megabytes", float("nan"), ["got nan", "finite"]),
        ("megabytes", float("inf"), ["got inf", "finite"]),
        ("megabytes", 10**400, ["finite"]),
        ("mode", "max", ["got 'max'", "'mean' or 'sum'"]),
        ("mode", 1, ["got 1 (int)", "'mean' or 'sum'"]),
        ("weights", "1.0", ["'1.0'", "list"]),
        ("weights", [1.0, "2"], ["[1]", "got '2' (str)", "float"]),
        ("weights", [1.0, 0], ["[1]", "got 0.0", "more than 0"]),
        ("weights", [9], ["[0]", "got 9.0", "less than 9"]),
        ("weights", [float("nan")], ["[0]", "got nan", "finite"]),
        ("weights", [], ["got []", "at least one float"]),
    ],
)
def test_wrong_values_name_the_setting_and_the_expectation(
    name: str, value: object, expected: list[str]
) -> None:
    settings = Outer()
    for use in (lambda: Outer(**{name: value}), lambda: setattr(settings, name, value)):
        with refuses(StrategyError, f"outer.{name}", *expected):
            use()
    assert settings == Outer()


def test_lossless_conversions_are_accepted() -> None:
    settings = Outer(megabytes=3, weights=(1, 2.5), limit=None)
    assert type(settings.megabytes) is float
    assert settings.weights == [1.0, 2.5]
    assert type(settings.weights[0]) is float
    assert settings.limit is None


def test_unknown_names_get_suggestions() -> None:
    with refuses(StrategyError, "outer", "'megabyte'", "'megabytes'"):
        Outer(megabyte=1)
    with refuses(StrategyError, "'inner_step'", "'inner_steps'"):
        Outer().inner_step = 1
    with refuses(StrategyError, "outer.inner", "'zzz'", "later, names"):
        Outer(inner={"zzz": 1})
    with refuses(AttributeError, "'mod'", "'mode'"):
        _ = Outer().mod  # type: ignore[attr-defined]
    with refuses(StrategyError, "'self'"):
        Outer(self=1)


def test_an_unavailable_setting_may_keep_its_default() -> None:
    assert Inner(later=0) == Inner()
    for assign in (lambda: Inner(later=1), lambda: Outer(inner={"later": 1})):
        with refuses(NotAvailableError, "outer.inner.later"):
            assign()


def test_settings_share_no_state() -> None:
    one, two, inner, names = Outer(), Outer(), Inner(), ["a"]
    one.inner.steps = 5
    one.weights.append(2.0)
    assert two == Outer()
    one.inner = two.inner = inner
    inner.steps = 9
    assert one.inner.steps == two.inner.steps == 1
    one.inner.names = names
    names.append("b")
    assert one.inner.names == ["a"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_is_equal_and_independent(copied: Any) -> None:
    original = Outer(on=True, inner={"steps": 3})
    twin = copied(original)
    assert twin == original
    assert twin.is_set("on")
    twin.inner.steps = 4
    twin.weights.append(0.5)
    twin.mode = "sum"
    assert original == Outer(on=True, inner={"steps": 3})
    assert not original.is_set("mode")


def test_equality_compares_class_and_values() -> None:
    assert Outer() == Outer(on=False)
    assert Outer() != Outer(on=True)
    assert Inner() != Outer()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Outer())


def test_is_set_is_true_for_an_explicit_default() -> None:
    settings = Outer(on=False)
    assert settings.is_set("on")
    assert not settings.is_set("mode")
    assert not settings.is_set("inner")
    settings.inner.steps = 1
    assert settings.is_set("inner")


def test_rules_of_returns_the_rules_of_a_field() -> None:
    assert rules_of(Outer(), "megabytes").doc == "how much"
    assert not rules_of(Inner(), "later").available


# -- strategies as TOML files


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


# -- the facts of the job


@pytest.fixture(autouse=True)
def restore_job() -> Iterator[None]:
    before = current_job()
    yield
    set_current_job(before)


def test_a_strategy_is_explained_for_the_current_job() -> None:
    strategy = DistributedStrategy(sync_batch_norm=True)
    set_current_job(JobFacts(worker_num=1))
    assert len(strategy.inert()) == 1
    set_current_job(JobFacts(worker_num=3))
    assert strategy.inert() == []
    assert strategy.explain().startswith("job: collective, 3 workers")


# -- settings of other systems: every way to set one gives an error with advice


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
