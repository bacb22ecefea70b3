# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the behaviour of every group of settings, shown with a small one."""

import copy
import pickle
from typing import Any, ClassVar

import pytest
from tests.errors import refuses

from fleetlight.errors import NotAvailableError, StrategyError
from fleetlight.strategy.settings import Nested, Settings, nested, rules_of, setting, settings_class


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
