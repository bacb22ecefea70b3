# SPDX-License-Identifier: Apache-2.0
"""`Settings`: a dataclass that checks each assignment against the field's rules."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from fleetlight.errors import NotAvailableError, StrategyError, did_you_mean
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.unsupported import advice_on

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Do nothing at run time; type checkers use the real one."""
        return lambda function: function


T = TypeVar("T")
Self = TypeVar("Self", bound="Settings")
Config = TypeVar("Config", bound="Settings")
ConfigDict = TypeVar("ConfigDict")

#: True if a setting takes effect in a job, and a sentence about it
Effect: TypeAlias = tuple[bool, str]
#: returns the effect of a setting for a strategy and a job
EffectRule: TypeAlias = Callable[[Any, JobFacts], Effect]


class Nested(Generic[Config, ConfigDict]):
    """The type of a field with a nested `Settings`, to which scripts also assign dicts."""

    if TYPE_CHECKING:

        def __get__(self, owner: object, kind: type | None = None, /) -> Config: ...

        def __set__(self, owner: object, value: Config | ConfigDict, /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Rules:
    """The description, effect and constraints of a field.

    A value must have the type of the default. In a list, each item must meet the constraints.
    """

    doc: str
    kind: type = bool
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[object, ...] = ()
    available: bool = True
    optional: bool = False
    #: the type of a list's items
    item: type = str
    #: True if a list must not be empty
    filled: bool = False
    #: the effect in a job, see `effects.py`
    effect: EffectRule | None = None
    #: the environment variable that overrides the default
    variable: str = ""


def setting(default: T, doc: str, **rules: Any) -> T:
    """A field of a `Settings` class with its default, description and rules."""
    metadata = {"rules": Rules(doc, **{"kind": type(default), **rules})}
    if isinstance(default, list):
        # each instance needs a list of its own
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)


def nested(config: type[Config], doc: str, **rules: Any) -> Nested[Config, Any]:
    """A field with a nested `Settings`, to which scripts also assign dicts."""
    metadata = {"rules": Rules(doc, kind=config, **rules)}
    return dataclasses.field(default_factory=config, metadata=metadata)  # type: ignore[arg-type]


@dataclass_transform(kw_only_default=True)
def settings_class(cls: type[Self]) -> type[Self]:
    """Class decorator for `Settings`; the fields are keywords of the constructor.

    Fields and aliases of the bases are inherited, those of the last base first.
    """
    cls.ALIASES = {k: v for base in reversed(cls.__mro__) for k, v in _aliases(base).items()}
    cls = dataclasses.dataclass(init=False, eq=False, repr=False)(cls)
    for field in dataclasses.fields(cls):
        config = field.metadata["rules"].kind
        if issubclass(config, Settings) and "DOTTED_NAME" not in vars(config):
            config.DOTTED_NAME = f"{cls.DOTTED_NAME}.{field.name}"
    return cls


def _aliases(cls: type) -> Mapping[str, str]:
    aliases: Mapping[str, str] = vars(cls).get("ALIASES", {})
    return aliases


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Settings:
    """Typed fields that are checked at each assignment."""

    #: the name in errors; that of a nested config is set by the class that has it as a field
    DOTTED_NAME: ClassVar[str] = "strategy"
    #: {other name: field}; a dotted field is in a nested config
    ALIASES: ClassVar[Mapping[str, str]] = {}

    def __init__(self, /, **settings: Any) -> None:
        object.__setattr__(self, "_set_names", set())
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, default_of(field))
        for name, value in settings.items():
            setattr(self, name, value)

    if not TYPE_CHECKING:  # so that type checkers accept only the fields

        def __setattr__(self, name: str, value: Any) -> None:
            target = self.ALIASES.get(name, name)
            if "." in target:
                owner, inner = target.split(".", 1)
                setattr(getattr(self, owner), inner, value)
                return
            field = self._field(target)
            object.__setattr__(self, target, self._checked(field, value))
            self._set_names.add(target)

        def __getattr__(self, name: str) -> Any:
            """Resolve an alias, or raise AttributeError with similar names."""
            if name in self.ALIASES:
                return operator.attrgetter(self.ALIASES[name])(self)
            raise AttributeError(self._unknown(name))

    def __getitem__(self, name: str) -> Any:
        """`configs["k_steps"]`, as for dicts."""
        target = self.ALIASES.get(name, name)
        self._field(target.split(".")[0])
        return operator.attrgetter(target)(self)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __copy__(self: Self) -> Self:
        # a copy must not share its nested configs
        return copy.deepcopy(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.changed())
        return f"{type(self).__name__}({shown})"

    def keys(self) -> list[str]:
        """The names of all settings."""
        return [field.name for field in dataclasses.fields(self)]

    def items(self) -> Iterator[tuple[str, Any]]:
        """All settings with their values."""
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    def changed(self) -> Iterator[tuple[str, Any]]:
        """The settings that differ from their defaults, with their values."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != default_of(field):
                yield field.name, value

    def is_set(self, name: str) -> bool:
        """True if the script has set this field, even to its default."""
        value = getattr(self, name)
        return name in self._set_names or (isinstance(value, Settings) and bool(value._set_names))

    @property
    def _set_names(self) -> set[str]:
        return cast("set[str]", self.__dict__["_set_names"])

    @_set_names.setter
    def _set_names(self, names: set[str]) -> None:
        self.__dict__["_set_names"] = names

    def _field(self, name: str) -> dataclasses.Field[Any]:
        for field in dataclasses.fields(self):
            if field.name == name:
                return field
        raise StrategyError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        advice = advice_on(f"{self.DOTTED_NAME}.{name}") or did_you_mean(
            name,
            [*self.keys(), *self.ALIASES],
            elsewhere=f"print({self.DOTTED_NAME}.explain(all=True)) shows all",
        )
        return f"{self.DOTTED_NAME} has no setting {name!r}; {advice}"

    def _checked(self, field: dataclasses.Field[Any], value: Any) -> Any:
        rules: Rules = field.metadata["rules"]
        where = f"{self.DOTTED_NAME}.{field.name}"
        if issubclass(rules.kind, Settings):
            value = _merged(getattr(self, field.name), value, where)
        else:
            value = _typed(value, rules, where)
            _check_rules(value, rules, where)
        if not rules.available and value != default_of(field):
            raise NotAvailableError(
                f"{where} is not yet available in this version of Fleetlight; "
                f"leave it at {default_of(field)!r}"
            )
        return value


def differences(one: Settings, other: Settings, prefix: str = "") -> list[str]:
    """`a_sync = False, now True` for each setting that differs, nested ones included."""
    found: list[str] = []
    for name, value in one.items():
        now = getattr(other, name)
        if isinstance(value, Settings):
            found += differences(value, now, f"{prefix}{name}.")
        elif value != now:
            found.append(f"{prefix}{name} = {value!r}, now {now!r}")
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default value of a field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def rules_of(settings: Settings, name: str) -> Rules:
    """The rules of one field."""
    return cast(Rules, settings._field(name).metadata["rules"])


def _merged(current: Settings, value: Any, where: str) -> Settings:
    """A nested config after an assignment; a dict changes only the keys that it has."""
    if isinstance(value, type(current)):
        return copy.deepcopy(value)
    if not isinstance(value, Mapping):
        raise StrategyError(
            f"{where}: got {value!r}, expected a dict or {type(current).__name__}(...)"
        )
    changed = copy.deepcopy(current)
    for key, inner in value.items():
        setattr(changed, str(key), inner)
    return changed


def _typed(value: Any, rules: Rules, where: str) -> Any:
    """Convert a value to the field's type, if without loss."""
    if (value is None and rules.optional) or _is_choice(value, rules):
        return value
    if rules.kind is float and type(value) is int:
        return _as_float(value)
    if rules.kind is list and isinstance(value, (list, tuple)):
        items = Rules(rules.doc, kind=rules.item)
        return [_typed(item, items, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is not rules.kind:
        expected = _choices(rules) if rules.choices else rules.kind.__name__
        raise StrategyError(f"{where}: got {value!r} ({type(value).__name__}), expected {expected}")
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf  # the caller refuses infinity


def _check_rules(value: Any, rules: Rules, where: str) -> None:
    if value is None:
        return
    if isinstance(value, list):
        _check_items(value, rules, where)
        return
    if rules.choices and not _is_choice(value, rules):
        raise StrategyError(f"{where}: got {value!r}, expected {_choices(rules)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise StrategyError(f"{where}: got {value}, expected a finite number")
    if rules.minimum is not None and value < rules.minimum:
        raise StrategyError(f"{where}: got {value!r}, expected at least {rules.minimum}")
    if rules.above is not None and not value > rules.above:
        raise StrategyError(f"{where}: got {value!r}, expected more than {rules.above}")
    if rules.maximum is not None and value > rules.maximum:
        raise StrategyError(f"{where}: got {value!r}, expected at most {rules.maximum:g}")
    if rules.below is not None and not value < rules.below:
        raise StrategyError(f"{where}: got {value!r}, expected less than {rules.below:g}")


def _check_items(values: list[Any], rules: Rules, where: str) -> None:
    if rules.filled and not values:
        raise StrategyError(f"{where}: got [], expected at least one {rules.item.__name__}")
    for i, value in enumerate(values):
        _check_rules(value, rules, f"{where}[{i}]")


def _is_choice(value: Any, rules: Rules) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in rules.choices)


def _choices(rules: Rules) -> str:
    return " or ".join(map(repr, rules.choices))
