# SPDX-License-Identifier: Apache-2.0
"""`strategy.dgc`: which optimizers it goes with, when it begins, and what they get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fleetlight.collective.codecs.codec import Span
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.dgc import DGC, Momentum, Sparsity, bytes_at, to_gradient
from fleetlight.collective.routes.route_segments import VELOCITY
from fleetlight.collective.routes.routing import crosses_a_link, senders
from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job
from fleetlight.observe.log import logger


class DeepCompression(Compression):
    """The compression of one model. A step is the one that the optimizer is about to make."""

    def __init__(self, job: Job, module: nn.Module) -> None:
        configs = job.strategy.dgc_configs
        self._dgc = DGC(
            self.momentum_of,
            clip_norm=configs.local_grad_clip_norm,
            factor_masking=configs.factor_masking,
        )
        super().__init__(self._dgc, min_size=configs.min_size, exclude=configs.exclude)
        self._job, self._module = job, module
        self._parameters = dict(module.named_parameters())
        #: of each parameter, its optimizer and the number of its param group
        self._owners: dict[int, tuple[torch.optim.Optimizer, int]] = {}
        self._sparsity = Sparsity(configs.rampup_begin_step, configs.rampup_step, configs.sparsity)
        #: the number of reductions behind which there was a step when gradients arrived last
        self._arrived_at = -1

    def prepare(self) -> bool:
        """As in `Compression`: False while gradients are still dense.

        The codec is told of the step: the thread that encodes only reads.
        """
        sparsity = self._sparsity.at(self._step)
        if sparsity is None:
            return False
        self._find_owners()
        self._dgc.sparsity = sparsity
        # it begins, or goes on where a checkpoint had none: nothing has gathered yet
        self._dgc.is_first = not self.residuals.has(VELOCITY)
        return True

    def message_bytes(self, values: int) -> int:
        """As in `Compression`: when it has become as sparse as it gets."""
        return bytes_at(self._sparsity.levels[-1], [Span("", 0, 0, values)])

    def warn_at_end(self) -> None:
        """Say so if gradients were dense to the end."""
        steps, begin = self._step, self._sparsity.begin
        if 0 < steps <= begin:
            logger.warning(
                "dgc: the job ended after step %d, and up to rampup_begin_step = %d gradients are "
                "dense, so none was compressed",
                steps,
                begin,
            )

    @property
    def _step(self) -> int:
        """How many steps each optimizer has made: several are taken to take turns."""
        return self._job.step // max(1, len(self._job.optimizers))

    def begin(self) -> None:
        """As in `Compression`: the optimizers must be such that momentum can be corrected."""
        self._check_optimizers()
        group = self._job.dense_group
        assert group is not None
        strategy = self._job.strategy
        by_levels = strategy.use_hierarchical_allreduce
        inner = strategy.hierarchical_allreduce_inter_nranks if by_levels else None
        self._dgc.senders = len(senders(group, inner))

    def receive(self, means: Mapping[str, Tensor]) -> None:
        """As in `Compression`: each reduction is to be that of one step."""
        self._refuse_second()
        self.correct(means)

    @torch.no_grad()
    def correct(self, means: Mapping[str, Tensor]) -> None:
        """As in `Compression`: it is given what it turns into the movement that has arrived."""
        self._check_optimizers()
        self._check_owners(means)
        for name, mean in means.items():
            to_gradient(mean, self.momentum_of(name))

    def _refuse_second(self) -> None:
        """Momentum that has gathered twice for one step would be wrong."""
        stepped = next(p.stepped for p in self._job.models if p.module is self._module)
        if stepped == self._arrived_at:
            raise PlanError(
                "dgc: the gradients of a model were reduced twice for one step of its optimizer, "
                "but each reduction lets momentum gather. Make the other backwards of a step "
                "inside fleet.no_sync(), or set gradient_merge; step behind every reduction: where "
                "a step was skipped behind backward, decide before backward, on all workers; and "
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

    def _find_owners(self) -> None:
        """Parameters, groups and optimizers may have changed in any way since the last step."""
        self._parameters = dict(self._module.named_parameters())
        self._owners = {
            id(parameter): (optimizer, number)
            for optimizer, number, parameter in self._held()
            if isinstance(optimizer, torch.optim.SGD)
        }

    def _held(self) -> Iterator[tuple[torch.optim.Optimizer, int, Tensor]]:
        """All that is stepped: by which optimizer, and in which of its groups."""
        for plan in self._job.optimizers:
            for number, group in enumerate(plan.optimizer.param_groups):
                for parameter in group["params"]:
                    yield plan.optimizer, number, parameter

    def _check_owners(self, names: Iterable[str]) -> None:
        """What was encoded without momentum must not be stepped with it."""
        held = {id(parameter) for _, _, parameter in self._held()}
        for name in names:
            number = id(self._parameters[name])
            if number in held and number not in self._owners:
                raise PlanError(
                    f"dgc: an optimizer got the parameter {name} while its gradient was on its "
                    "way; add parameters before backward or behind the step"
                )

    def _check_optimizers(self) -> None:
        """Some may have been registered late, and a scheduler may have set momentum to zero."""
        for plan in self._job.optimizers:
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


def uses_dgc(job: Job) -> bool:
    """Whether the gradients of the job are compressed by it."""
    group = job.collective_group
    if not job.strategy.dgc or group is None or group.alone:
        return False
    return crosses_a_link(group, job.strategy.shared_memory)


def clipping_error(got: str) -> PlanError:
    """The gradients of a job with DGC are what lets the optimizer make a certain movement."""
    return PlanError(
        f"{got}: with strategy.dgc the gradients between backward and step are no longer those of "
        "the loss; clip what each worker sends by strategy.dgc_configs.local_grad_clip_norm"
    )
