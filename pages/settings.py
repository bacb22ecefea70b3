# SPDX-License-Identifier: Apache-2.0
"""The page of all settings, from the fields of `DistributedStrategy` and their rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import fleetlight as fleet
from fleetlight.strategy import JobFacts
from fleetlight.strategy.effects import effect_of
from fleetlight.strategy.settings import Rules, Settings

#: jobs in which settings may differ
_JOBS = {
    "In a collective job of 4 workers on 2 hosts": JobFacts(worker_num=4, node_num=2),
    "With 2 servers and 4 workers": JobFacts(is_collective=False, worker_num=4, server_num=2),
}
#: the pages that say more
_MORE = {
    "a_sync": "parameter-servers.md#modes",
    "a_sync_configs": "parameter-servers.md#modes",
    "broadcast_buffers": "collective.md#buffers",
    "checkpoint": "checkpoints.md#stopping-and-resuming",
    "checkpoint_configs": "checkpoints.md#bases-and-deltas",
    "compression": "slow-networks.md#compression",
    "compression_configs": "slow-networks.md#compression",
    "adaptive_localsgd": "slow-networks.md#adaptive-localsgd",
    "dgc": "slow-networks.md#dgc",
    "diloco": "slow-networks.md#diloco",
    "durability": "reliability.md",
    "execution_strategy": "static.md",
    "fetch_frequency": "static.md",
    "fp16_allreduce": "collective.md#half-precision",
    "gradient_merge": "collective.md#several-backwards-one-step",
    "localsgd": "slow-networks.md#localsgd",
    "lost_worker": "reliability.md#workers",
    "shared_memory": "collective.md#shared-memory",
    "ssl": "launcher.md#encrypted-connections",
    "ssl_configs": "launcher.md#encrypted-connections",
    "sync_batch_norm": "collective.md#batch-norm",
    "use_hierarchical_allreduce": "collective.md#several-hosts",
    "worker_seeds": "collective.md#random-numbers",
}
_ABOUT = """\
# All settings

The fields of [`fleet.DistributedStrategy`](strategy.md), from its code.
[The strategy](../strategy.md) shows how to set them, and which exclude each other. Below a field is
what `explain()` says of its default in two jobs, where that differs."""


def settings_page() -> dict[str, str]:
    """The page by its path below docs/."""
    strategy = fleet.DistributedStrategy()
    parts = [_ABOUT]
    for field in dataclasses.fields(strategy):
        parts += _field(strategy, field)
    return {"reference/settings.md": "\n\n".join(parts) + "\n"}


def _field(strategy: fleet.DistributedStrategy, field: dataclasses.Field[object]) -> Iterator[str]:
    rules: Rules = field.metadata["rules"]
    yield f"## {field.name}"
    more = f" [More](../{_MORE[field.name]})." if field.name in _MORE else ""
    yield f"{_sentence(rules.doc)}{more}"
    if issubclass(rules.kind, Settings):
        config: Settings = strategy[field.name]
        facts = [
            f"- `{one.name}`: {one.metadata['rules'].doc}. {_facts(config, one)}"
            for one in dataclasses.fields(config)
        ]
        yield "\n".join(facts)
        return
    effects = {where: effect_of(strategy, field.name, job) for where, job in _JOBS.items()}
    lines = [f"- {_facts(strategy, field)}"]
    if len({sentence for _, sentence in effects.values()}) > 1:
        lines += [
            f"- {where}: {'' if active else 'no effect, '}{sentence}."
            for where, (active, sentence) in effects.items()
        ]
    yield "\n".join(lines)


def _facts(owner: Settings, field: dataclasses.Field[object]) -> str:
    """The default of a field, its values and its variable."""
    rules: Rules = field.metadata["rules"]
    facts = [f"Default: `{_value(getattr(owner, field.name))}`."]
    if rules.choices:
        facts.append(f"One of {', '.join(f'`{_value(one)}`' for one in rules.choices)}.")
    facts += [
        f"{word} {limit:g}."
        for word, limit in (
            ("At least", rules.minimum),
            ("Above", rules.above),
            ("At most", rules.maximum),
            ("Below", rules.below),
        )
        if limit is not None
    ]
    if rules.variable:
        facts.append(f"`{rules.variable}` gives the default.")
    if not rules.available:
        facts.append("Not yet available.")
    return " ".join(facts)


def _value(value: object) -> str:
    return repr(value).replace("'", '"')


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
