# SPDX-License-Identifier: Apache-2.0
"""Explain which settings take effect in a job.

Each field has a rule that returns `(active, sentence)`. The rule of a nested config covers all
its fields; without one, `x_configs` takes effect where `x` does. A field of a nested config may
also have its own rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fleetlight.errors import counted
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, EffectRule, Settings, rules_of


def explain(
    strategy: Settings, job: JobFacts, flags: Mapping[str, str], *, everything: bool
) -> str:
    """A table of the settings that were changed, with their values, effects and sources.

    `everything`: also those with their defaults. A nested config then has one line if no field was
    set and none has an effect, else one per field.
    """
    rows = [_headline(job)]
    if everything:
        rows += _all_rows(strategy, job, flags)
    else:
        shown = [*_mentioned(strategy, {*flags, *job.given})]
        rows += [_row(strategy, name, job, flags) for name in shown]
        others = sum(1 for _ in _leaves(strategy)) - len(shown)
        rows.append(f"{counted(others, 'setting')} with defaults: explain(all=True) shows them")
    rows.append("* takes effect   ! was set but has no effect in this job")
    return "\n".join(rows)


def _all_rows(strategy: Settings, job: JobFacts, flags: Mapping[str, str]) -> Iterator[str]:
    for name, value in strategy.items():
        if not isinstance(value, Settings):
            yield _row(strategy, name, job, flags)
        elif any(value.changed()) or effect_of(strategy, name, job)[0]:
            for field in value:
                yield _row(strategy, f"{name}.{field}", job, flags)
        else:
            yield f"   {name} ({', '.join(value.keys())}): {effect_of(strategy, name, job)[1]}"


def _leaves(strategy: Settings) -> Iterator[str]:
    """The names of all settings, dotted for nested ones."""
    for name, value in strategy.items():
        if isinstance(value, Settings):
            yield from (f"{name}.{field}" for field in value)
        else:
            yield name


def _mentioned(strategy: Settings, given: Collection[str]) -> Iterator[str]:
    """The settings that the script or a variable has set, or that differ from their defaults."""
    changed = set(_changed(strategy))
    for name in _leaves(strategy):
        config, _, field = name.rpartition(".")
        owner: Settings = strategy[config] if config else strategy
        if name in changed or name in given or owner.is_set(field):
            yield name


def inert(strategy: Settings, job: JobFacts) -> list[str]:
    """One sentence for each setting that was changed and has no effect in this job."""
    sentences = []
    for name in _changed(strategy):
        active, why = effect_of(strategy, name, job)
        if not active:
            sentences.append(f"strategy.{name} = {strategy[name]!r} has no effect: {why}")
    return sentences


def effect_of(strategy: Settings, name: str, job: JobFacts) -> Effect:
    """True if a setting takes effect in this job, and a sentence about it.

    `name` may be dotted, as in `a_sync_configs.staleness`.
    """
    config, _, field = name.partition(".")
    if not rules_of(strategy, config).available:
        return False, "not yet available in this version"
    active, why = _rule(strategy, config)(strategy, job)
    if not active or not field:
        return active, why
    return _rule(strategy[config], field)(strategy, job)


def _rule(owner: Settings, name: str) -> EffectRule:
    """The rule of a field: its own, or else by its switch or its description."""
    rules = rules_of(owner, name)
    if rules.effect is not None:
        return rules.effect
    if issubclass(rules.kind, Settings):
        switch = name.removesuffix("_configs")
        return follows(switch, f"as {switch} says")
    return always(rules.doc)


def always(sentence: str) -> EffectRule:
    """The rule of a setting that takes effect in every job."""
    return lambda strategy, job: (True, sentence)


def follows(switch: str, sentence: str) -> EffectRule:
    """The rule of a setting that takes effect where its switch is on and takes effect."""

    def rule(strategy: Settings, job: JobFacts) -> Effect:
        active, why = effect_of(strategy, switch, job)
        if not active:
            return False, f"{switch} has no effect: {why}"
        if not strategy[switch]:
            return False, f"{switch} is off"
        return True, sentence

    return rule


def _changed(strategy: Settings) -> Iterator[str]:
    """The settings that differ from their defaults, with dotted names for nested ones."""
    for name, value in strategy.changed():
        if isinstance(value, Settings):
            yield from (f"{name}.{field}" for field, _ in value.changed())
        else:
            yield name


def _row(strategy: Settings, name: str, job: JobFacts, flags: Mapping[str, str]) -> str:
    active, why = effect_of(strategy, name, job)
    config, _, field = name.rpartition(".")
    owner: Settings = strategy[config] if config else strategy
    # a switch that is off, as it is by default, changes nothing
    is_off = owner[field] is False and name not in _changed(strategy)
    mark = "*" if active and not is_off else ("!" if name in _changed(strategy) else " ")
    source = f" (from {flags[name]})" if name in flags and not owner.is_set(field) else ""
    return f" {mark} {name} = {strategy[name]!r}{source}: {why}"


def _headline(job: JobFacts) -> str:
    servers = counted(job.server_num, "server")
    mode = "collective" if job.is_collective else f"parameter-server, {servers}"
    workers, hosts = counted(job.worker_num, "worker"), counted(job.node_num, "host")
    return f"job: {mode}, {workers} on {hosts}, {job.backend}"
