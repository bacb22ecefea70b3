# SPDX-License-Identifier: Apache-2.0
"""`DistributedStrategy`: all settings of a job, typed, validated, stored as TOML."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetlight.errors import NotAvailableError, StrategyError
from fleetlight.strategy import effects, feature, toml
from fleetlight.strategy.features.a_sync import ASyncFeature
from fleetlight.strategy.features.amp import AmpFeature
from fleetlight.strategy.features.checkpoint import CheckpointFeature
from fleetlight.strategy.features.durability import DeadlineFeature, DurabilityFeature
from fleetlight.strategy.features.gradient_merge import GradientMergeFeature
from fleetlight.strategy.features.local_training import (
    AdaptiveLocalSGDFeature,
    DiLoCoFeature,
    LocalSGDFeature,
)
from fleetlight.strategy.features.programs import ProgramsFeature
from fleetlight.strategy.features.recompute import RecomputeFeature
from fleetlight.strategy.features.reduction.compression import CompressionFeature
from fleetlight.strategy.features.reduction.data_parallel import DataParallelFeature
from fleetlight.strategy.features.reduction.dgc import DGCFeature
from fleetlight.strategy.features.reduction.fusion import FusionFeature
from fleetlight.strategy.features.reduction.hierarchy import HierarchyFeature
from fleetlight.strategy.features.reduction.process_groups import ProcessGroupsFeature
from fleetlight.strategy.features.seeds import SeedsFeature
from fleetlight.strategy.features.sinks import SinksFeature
from fleetlight.strategy.features.ssl import SslFeature
from fleetlight.strategy.job import JobFacts, current_job
from fleetlight.strategy.settings import Rules, Settings, rules_of, settings_class


@settings_class
class DistributedStrategy(
    # a dataclass has the fields of its last base first
    DeadlineFeature,
    SeedsFeature,
    SslFeature,
    CheckpointFeature,
    DurabilityFeature,
    SinksFeature,
    ProgramsFeature,
    DataParallelFeature,
    RecomputeFeature,
    AmpFeature,
    DGCFeature,
    CompressionFeature,
    GradientMergeFeature,
    ProcessGroupsFeature,
    HierarchyFeature,
    FusionFeature,
    DiLoCoFeature,
    AdaptiveLocalSGDFeature,
    LocalSGDFeature,
    ASyncFeature,
):
    """All settings of a job. `explain()` shows which of them take effect in this job.

    Settings are keywords, attributes and dicts; each assignment is checked. Nested settings such as
    `gradient_merge_configs` take a dict, which changes the keys that it has.

    Raises:
        StrategyError: a setting has an unknown name, a wrong type or a wrong value. For those of
            Fleet and MindSpore the message says what to use instead.
        NotAvailableError: this version does not implement the setting yet.

    Example:
        >>> strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 100})
        >>> strategy.gradient_merge_configs.k_steps = 4
        >>> strategy.to_file("strategy.toml")
        >>> fleet.DistributedStrategy.from_file("strategy.toml") == strategy
        True
    """

    if not TYPE_CHECKING:  # so that type checkers accept only the fields as keywords

        def __init__(self, /, **settings: Any) -> None:
            super().__init__()
            #: {setting: variable} for defaults from the environment
            object.__setattr__(self, "_flags", _read_flags(self))
            for name, value in settings.items():
                setattr(self, name, value)

    def explain(self, job: JobFacts | None = None, *, all: bool = False) -> str:
        """What was changed and its effect in this job; `all`: also the settings with defaults."""
        flags: dict[str, str] = self.__dict__["_flags"]
        return effects.explain(self, job or current_job(), flags, everything=all)

    def inert(self, job: JobFacts | None = None) -> list[str]:
        """One sentence for each setting that was changed and has no effect in this job."""
        return effects.inert(self, job or current_job())

    def check(self, job: JobFacts | None = None) -> None:
        """Raise StrategyError if this job cannot do what the strategy asks for."""
        feature.check(self, job or current_job())

    def to_file(self, path: str | Path) -> None:
        """Write all settings that differ from their defaults, as TOML."""
        Path(path).write_text(toml.dumps(self), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path) -> DistributedStrategy:
        """Read settings from a TOML file."""
        try:
            return cls(**toml.load(Path(path)))
        except (StrategyError, NotAvailableError) as error:
            raise type(error)(f"{path}: {error}") from None


def variables_of(settings: type[Settings], prefix: str = "") -> dict[str, str]:
    """{environment variable: setting whose default it overrides}."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        rules: Rules = field.metadata["rules"]
        if rules.variable:
            found[rules.variable] = prefix + field.name
        if issubclass(rules.kind, Settings):
            found |= variables_of(rules.kind, f"{field.name}.")
    return found


def _read_flags(strategy: DistributedStrategy) -> dict[str, str]:
    """Apply the variables that override defaults; return {setting: variable}."""
    used: dict[str, str] = {}
    for variable, name in variables_of(type(strategy)).items():
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        config, _, field = name.rpartition(".")
        owner: Settings = strategy[config] if config else strategy
        try:
            value = _parse_flag(text, rules_of(owner, field).kind)
            if not isinstance(value, str) and value < 0:
                continue  # in Fleet, a negative value means the framework's default
            setattr(owner, field, value)
        except (ValueError, StrategyError) as error:
            raise StrategyError(f"{variable}={text!r} in the environment: {error}") from None
        owner._set_names.discard(field)
        used[name] = variable
    return used


def _parse_flag(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError("expected 0 or 1")
        return text.lower() in ("1", "true")
    return kind(text)
