# SPDX-License-Identifier: Apache-2.0
"""`strategy.dgc`: which optimizers it goes with, when it begins, and what they get."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.dgc import DGC, Momentum, handed_over
from fleetlight.collective.codecs.sparsity import Sparsity
from fleetlight.collective.group import Group
from fleetlight.collective.routes.routing import crosses_a_link, senders_of
from fleetlight.errors import PlanError
from fleetlight.fleet.context import Context


class DeepCompression(Compression):
    """The compression of one model. A step is the one that the optimizer is about to make."""

    def __init__(self, context: Context, module: nn.Module) -> None:
        configs = context.strategy.dgc_configs
        self._dgc = DGC(
            self.momentum_of,
            clip_norm=configs.local_grad_clip_norm,
            factor_masking=configs.factor_masking,
        )
        super().__init__(self._dgc, min_size=configs.min_size, exclude=configs.exclude)
        self._context, self._module = context, module
        self._parameters = dict(module.named_parameters())
        #: of each parameter, its optimizer and the number of its param group
        self._owners: dict[int, tuple[torch.optim.Optimizer, int]] = {}
        #: how many groups the optimizers had when that was found out
        self._groups: list[int] = []
        self._sparsity = Sparsity(configs.rampup_begin_step, configs.rampup_step, configs.sparsity)
        #: the number of reductions behind which there was a step when gradients arrived last
        self._arrived_at = -1

    @property
    def is_on(self) -> bool:
        """False while gradients are still dense. The codec is told how sparse they are now."""
        self._renew_owners()
        step = self._step
        sparsity = self._sparsity.at(step)
        if sparsity is None:
            return False
        self._dgc.sparsity = sparsity
        self._dgc.begins = step == self._sparsity.begin
        return True

    @property
    def _step(self) -> int:
        """How many steps each optimizer has made: several are taken to take turns."""
        return self._context.step // max(1, len(self._context.optimizers))

    def begin(self) -> None:
        """As in `Compression`: the optimizers must be such that momentum can be corrected."""
        self._check_optimizers()
        group = self._context.group
        assert isinstance(group, Group)
        strategy = self._context.strategy
        by_levels = strategy.use_hierarchical_allreduce
        inner = strategy.hierarchical_allreduce_inter_nranks if by_levels else None
        self._dgc.senders = senders_of(group, inner)

    def arrived(self, means: Mapping[str, Tensor]) -> None:
        """As in `Compression`: each reduction is to be that of one step."""
        self._check_optimizers()
        self._refuse_second()
        self.hand_over(means)

    @torch.no_grad()
    def hand_over(self, means: Mapping[str, Tensor]) -> None:
        """As in `Compression`: it is given what it turns into the movement that has arrived."""
        for name, mean in means.items():
            handed_over(mean, self.momentum_of(name))

    def _refuse_second(self) -> None:
        """Momentum that has gathered twice for one step would be wrong."""
        stepped = next(p.stepped for p in self._context.models if p.module is self._module)
        if stepped == self._arrived_at:
            raise PlanError(
                "dgc: the gradients of a model were reduced twice for one step of its optimizer, "
                "but each reduction lets momentum gather. Make the other backwards of a step "
                "inside fleet.no_sync(), or set gradient_merge; step behind every reduction; and "
                "detach what only passes through the model"
            )
        self._arrived_at = stepped

    def momentum_of(self, name: str) -> Momentum:
        """How the parameter is stepped."""
        parameter = self._parameters[name]
        optimizer, number = self._owners.get(id(parameter), (None, 0))
        if optimizer is None:
            return Momentum(parameter)  # nobody steps it
        group = optimizer.param_groups[number]
        state = optimizer.state.get(parameter, {})
        return Momentum(
            parameter,
            group["momentum"],
            group["nesterov"],
            group["weight_decay"],
            state.get("momentum_buffer"),
        )

    def _renew_owners(self) -> None:
        """Optimizers and groups may be added; the thread that encodes only reads."""
        optimizers = [plan.optimizer for plan in self._context.optimizers]
        groups = [len(optimizer.param_groups) for optimizer in optimizers]
        if groups == self._groups:
            return
        self._owners = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.SGD)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._groups = groups

    def _check_optimizers(self) -> None:
        """Some may have been registered late, and a scheduler may have set momentum to zero."""
        for plan in self._context.optimizers:
            check_optimizer(plan.optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """DGC knows the momentum of one kind of optimizer."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.SGD):
        raise PlanError(
            f"strategy.dgc: got the optimizer {kind.__module__}.{kind.__qualname__}, expected "
            "torch.optim.SGD with momentum, which DGC corrects; compression='topk' goes with every "
            "optimizer"
        )
    for number, group in enumerate(optimizer.param_groups):
        wrong = [
            f"{name}={group[name]!r}"
            for name, right in (
                ("momentum", group["momentum"] > 0),
                ("dampening", group["dampening"] == 0),
                ("maximize", not group["maximize"]),
            )
            if not right
        ]
        if wrong:
            raise PlanError(
                f"strategy.dgc: param group {number} of the optimizer has {', '.join(wrong)}, "
                "expected momentum above 0, dampening 0 and maximize False"
            )


def uses_dgc(context: Context) -> bool:
    """Whether the gradients of the job are compressed by it."""
    group = context.group
    if not context.strategy.dgc or not isinstance(group, Group) or group.alone:
        return False
    return crosses_a_link(group, context.strategy.shared_memory)


def clipping_error(got: str) -> PlanError:
    """The gradients of a job with DGC are what lets the optimizer make a certain movement."""
    return PlanError(
        f"{got}: with strategy.dgc the gradients between backward and step are no longer those of "
        "the loss; clip what each worker sends by strategy.dgc_configs.local_grad_clip_norm"
    )
