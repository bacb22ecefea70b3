# SPDX-License-Identifier: Apache-2.0
"""Builds the plan of a job with servers from what the script has registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.errors import PlanError, StrategyError, did_you_mean
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.remote_embedding import is_movable, refuse_unmovable
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.ps.dtypes import NAMES
from fleetlight.ps.layers.embedding import DEFAULT, TableLayer, initializer_plan
from fleetlight.ps.plan import (
    ASYNC,
    GEO,
    SHOW_CLICK,
    SYNC,
    DensePlan,
    Plan,
    RulePlan,
    TablePlan,
)
from fleetlight.ps.tables.optimizers import optimizer_plan, own_rule, rule_of
from fleetlight.strategy import ASyncConfigs, DistributedStrategy

_PARTS = ("weight", "ids")


def refuse_name_clash(model: nn.Module, tables: Mapping[str, list[Any]], prefix: str = "") -> None:
    """PlanError where a name of a table's rows is that of another value.

    Of several models, each is checked under its own names, without its `prefix`.
    """
    inside = {id(module): path for path, module in model.named_modules()}
    values = dict(_values(model))
    for table, layers in tables.items():
        mine = [layer for layer in layers if id(layer) in inside]
        weights = {id(layer.weight) for layer in mine}
        for part in _PARTS if mine else ():
            name = f"{table.removeprefix(prefix)}.{part}"
            if name in values and id(values[name]) not in weights:
                raise _refusal(model, table, inside[id(mine[0])], name)


def _values(model: nn.Module) -> Iterator[tuple[str, object]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _refusal(model: nn.Module, table: str, path: str, name: str) -> PlanError:
    owner = name.rpartition(".")[0]
    kind = type(model.get_submodule(owner)).__name__
    return PlanError(
        f"table {table!r} of layer {path or 'the model itself'} has the name of module {owner!r} "
        f"({kind}): its rows and a value of that module would both be saved as {name!r}; give the "
        f"layer another name for its table, such as table={table + '_rows'!r}"
    )


#: the optimizer and group of a parameter that no optimizer steps
_NO_OPTIMIZER = (-1, -1)


@dataclasses.dataclass
class BoundPlan:
    """A plan, and the objects of this process behind its numbers."""

    plan: Plan
    #: the layers of each table; the first gives it its name
    layers: list[list[nn.Module]]
    dense: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]

    def weights(self, table: int) -> list[nn.Parameter]:
        """The weights in the model that stand for a table; layers may share one."""
        weights: dict[int, Any] = {id(layer.weight): layer.weight for layer in self.layers[table]}
        return list(weights.values())


def bound_plan_of(job: Job) -> BoundPlan:
    """Build the plan of what the script has registered in this process."""
    if not job.models:
        raise PlanError(
            "no model is registered, so the parameter servers cannot make their tables; add "
            "model = fleet.distributed_model(model) before fleet.init_worker() and "
            "fleet.init_server()"
        )
    modules = [managed.module for managed in job.models]
    bound = build_plan(
        modules[0] if len(modules) == 1 else nn.ModuleList(modules),
        [managed.optimizer for managed in job.optimizers],
        job.strategy,
        worker_num=job.role.worker_num,
        server_num=max(1, job.role.server_num),
    )
    for number, module in enumerate(modules if len(modules) > 1 else ()):
        named = zip(bound.plan.tables, bound.layers, strict=True)
        refuse_name_clash(module, {table.name: some for table, some in named}, f"{number}.")
    return bound


def build_plan(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    strategy: DistributedStrategy,
    *,
    worker_num: int,
    server_num: int,
) -> BoundPlan:
    """Build the plan of a model and its optimizers; it is equal in every process of the job."""
    owners = _owners(optimizers)
    layers = _layers(model)
    ours = {id(layer.weight) for group in layers.values() for layer in group}
    dense = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in ours and id(parameter) in owners
    ]
    _refuse_unregistered(model, optimizers)
    configs, mode = strategy.a_sync_configs, mode_of(strategy)
    if mode == GEO and configs.dense != "servers":
        raise StrategyError(
            "a_sync_configs: got k_steps above 0 and dense='allreduce', but workers of GeoSGD "
            "train alone between two exchanges; leave one of them out"
        )
    plan = Plan(
        mode=mode,
        worker_num=worker_num,
        server_num=server_num,
        seed=strategy.seed,
        tables=[_table(name, group, optimizers, owners, configs) for name, group in layers.items()],
        dense=[_dense(name, parameter, owners) for name, parameter in dense],
        optimizers=[optimizer_plan(optimizer) for optimizer in optimizers],
        k_steps=configs.k_steps if strategy.a_sync else 0,
        staleness=configs.staleness if strategy.a_sync else None,
        serves_dense=configs.dense == "servers",
        on_nonfinite=configs.on_nonfinite,
        durability=strategy.durability,
        lost_worker=strategy.lost_worker,
        table_folder=configs.table_folder,
    )
    for table in plan.tables:
        _refuse_cache(table, plan)
        _refuse_score(table, plan)
    return BoundPlan(plan, list(layers.values()), [parameter for _, parameter in dense], optimizers)


def _refuse_unregistered(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """PlanError for parameters outside of all registered models: no server would train them."""
    known = {id(parameter) for parameter in model.parameters()}
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    unregistered = sum(p.requires_grad and id(p) not in known for p in stepped)
    if unregistered:
        raise PlanError(
            f"{unregistered} parameters of the optimizer are in no distributed model, so no server "
            "would train them; add model = fleet.distributed_model(model) for each model they "
            "belong to"
        )


def mode_of(strategy: DistributedStrategy) -> str:
    """The mode that a strategy's settings select."""
    if not strategy.a_sync:
        return SYNC
    return GEO if strategy.a_sync_configs.k_steps else ASYNC


def _owners(optimizers: list[torch.optim.Optimizer]) -> dict[int, tuple[int, int]]:
    """By id of a parameter: the numbers of its optimizer and of its param group."""
    owners: dict[int, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for group, settings in enumerate(optimizer.param_groups):
            for parameter in settings["params"]:
                if owners.setdefault(id(parameter), (number, group))[0] != number:
                    raise PlanError(
                        "a parameter is in two distributed optimizers; put it into one of them"
                    )
    return owners


def _layers(model: nn.Module) -> dict[str, list[Any]]:
    """The layers of each table by its name; layers share a table by name or by their weight."""
    found: dict[str, list[Any]] = {}
    names: dict[int, str] = {}
    for path, layer in _table_layers(model):
        name = getattr(layer, "table", None) or path or type(layer).__name__
        name = names.setdefault(id(layer.weight), name)
        found.setdefault(name, []).append(layer)
    for name, layers in found.items():
        _check_same_settings(name, layers)
    refuse_tied(model, served=True)
    refuse_name_clash(model, found)
    return found


def _table_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(module, TableLayer):
            yield path, module
        elif is_movable(module):
            refuse_unmovable(path, module)
            yield path, module


def _check_same_settings(name: str, layers: list[Any]) -> None:
    facts = [
        (
            _dim(one),
            _initializer(one),
            _entry(one),
            *_narrow(one),
            *_cache(one),
            _memory(one),
            *_maximum(one),
        )
        for one in layers
    ]
    if any(fact != facts[0] for fact in facts):
        raise PlanError(
            f"table {name!r} is shared by layers that differ: "
            "(dim, initializer, entry, wire, dtype, cache, cache_rows, memory, max_rows, evict) is "
            f"{' and '.join(str(fact) for fact in dict.fromkeys(map(str, facts)))}"
        )


def _dim(layer: Any) -> int:
    return int(layer.dim if isinstance(layer, TableLayer) else layer.embedding_dim)


def _initializer(layer: Any) -> Any:
    # worker 0 sends all rows of a moved layer, so its initializer is never used
    return layer.initializer if isinstance(layer, TableLayer) else initializer_plan(DEFAULT)


def _entry(layer: Any) -> Any:
    return layer.entry.plan if isinstance(layer, TableLayer) and layer.entry else None


def _narrow(layer: Any) -> tuple[str | None, str | None]:
    """The layer's own `wire` and `dtype`."""
    return (layer.wire, layer.dtype) if isinstance(layer, TableLayer) else (None, None)


def _cache(layer: Any) -> tuple[str | None, int]:
    """Where a layer keeps rows, and how many."""
    return (layer.cache, layer.cache_rows) if isinstance(layer, TableLayer) else (None, 0)


def _memory(layer: Any) -> int:
    """The bytes of rows that each server has in memory; 0: all."""
    return layer.memory or 0 if isinstance(layer, TableLayer) else 0


def _maximum(layer: Any) -> tuple[int, str]:
    """The most rows of the table, and which leave it first; 0: any number."""
    if not isinstance(layer, TableLayer) or layer.max_rows is None:
        return 0, ""
    return layer.max_rows, layer.evict or ""


def _refuse_cache(table: TablePlan, plan: Plan) -> None:
    """Raise for a table with a cache whose rows could be outdated, or miss what an entry counts."""
    reason = _without_cache(table, plan) if table.cached else None
    if reason is not None:
        raise PlanError(f"table {table.name!r}: got cache='device', but {reason}")


def _refuse_score(table: TablePlan, plan: Plan) -> None:
    """Raise for a table that admits by the scores of a table that has none."""
    name = table.entry.table if table.entry is not None else ""
    counting = [t.name for t in plan.tables if t.entry is not None and t.entry.kind == SHOW_CLICK]
    if name and name not in counting:
        known = did_you_mean(name, counting) if counting else "no table counts shows and clicks"
        raise PlanError(
            f"table {table.name!r}: its ScoreEntry names the table {name!r}, expected one whose "
            f"layer has entry=fleet.ShowClickEntry(); {known}"
        )


def _without_cache(table: TablePlan, plan: Plan) -> str | None:
    """Why the table cannot have a cache, and what to do; None if it can."""
    if plan.exchanges_differences:
        return (
            "a worker of GeoSGD trains its own copies of rows, in main memory; leave the cache "
            "out (a_sync_configs.cache_rows limits these copies), or use sync mode"
        )
    if plan.pushes_alone and plan.staleness is None:
        return (
            "in async mode no reply names the rows that other workers have changed, so the age of "
            "a cached row has no limit; set a_sync_configs={'staleness': 4} or another limit, use "
            "sync mode, or leave the cache out"
        )
    if table.entry is not None:
        return (
            "its entry counts each use of an id on the servers, which a cached row does not reach; "
            "leave one of them out"
        )
    if table.max_rows:
        return "no reply names the rows that leave a table with max_rows; leave one of them out"
    return None


def _table(
    name: str,
    layers: list[Any],
    optimizers: list[torch.optim.Optimizer],
    owners: dict[int, tuple[int, int]],
    configs: ASyncConfigs,
) -> TablePlan:
    places = {owners.get(id(layer.weight), _NO_OPTIMIZER) for layer in layers}
    if len(places) > 1:
        raise PlanError(
            f"table {name!r} is shared by layers whose weights are in different param groups; put "
            "them into one group"
        )
    number, group = places.pop()
    wire, dtype = _narrow(layers[0])
    return TablePlan(
        name=name,
        dim=_dim(layers[0]),
        rule=_rule(name, layers[0], optimizers, number, group),
        initializer=_initializer(layers[0]),
        optimizer=number,
        group=group,
        entry=_entry(layers[0]),
        rows=0 if isinstance(layers[0], TableLayer) else int(layers[0].num_embeddings),
        wire=wire or configs.table_wire,
        dtype=dtype or configs.table_dtype,
        cached=_cache(layers[0])[0] is not None,
        memory=_memory(layers[0]),
        max_rows=_maximum(layers[0])[0],
        evict=_maximum(layers[0])[1],
    )


def _rule(
    name: str, layer: Any, optimizers: list[torch.optim.Optimizer], number: int, group: int
) -> RulePlan:
    """The layer's own rule, or that of its param group; an untrained table has a rule, too."""
    own = layer.optimizer if isinstance(layer, TableLayer) else None
    if own is not None:
        return own_rule(own, name)
    if number < 0:
        return own_rule("sgd", name)
    return rule_of(optimizers[number], optimizers[number].param_groups[group], name)


def _dense(name: str, parameter: Tensor, owners: dict[int, tuple[int, int]]) -> DensePlan:
    number, group = owners[id(parameter)]
    dtype = NAMES.get(parameter.dtype)
    if dtype is None:
        raise PlanError(
            f"parameter {name} is of {parameter.dtype}; parameter servers keep "
            f"{', '.join(NAMES.values())}"
        )
    return DensePlan(name, tuple(parameter.shape), dtype, number, group)
