# SPDX-License-Identifier: Apache-2.0
"""`strategy.dgc`: deep gradient compression of a model, with momentum correction."""

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
    """The compression of one model, for the step that the optimizer is about to make."""

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
        #: by id of a parameter: its optimizer and the number of its param group
        self._owners: dict[int, tuple[torch.optim.Optimizer, int]] = {}
        self._sparsity = Sparsity(configs.rampup_begin_step, configs.rampup_step, configs.sparsity)
        #: `reductions_at_step` of the model when gradients arrived last
        self._reduced_at = -1

    def prepare(self) -> bool:
        """Set the step's sparsity in the codec; returns False while gradients are still dense.

        The thread that encodes only reads the codec's settings.
        """
        sparsity = self._sparsity.at(self._step)
        if sparsity is None:
            return False
        self._find_owners()
        self._dgc.sparsity = sparsity
        # at the first sparse step, or after a checkpoint without it, no momentum has accumulated
        self._dgc.is_first = not self.residuals.has(VELOCITY)
        return True

    def message_bytes(self, values: int) -> int:
        """The bytes of a message at the final sparsity."""
        return bytes_at(self._sparsity.levels[-1], [Span("", 0, 0, values)])

    def warn_at_end(self) -> None:
        """Warn if gradients were dense to the end."""
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
        """The number of steps of each optimizer; several are assumed to take turns."""
        return self._job.step // max(1, len(self._job.optimizers))

    def begin(self) -> None:
        self._check_optimizers()
        group = self._job.dense_group
        assert group is not None
        strategy = self._job.strategy
        by_levels = strategy.use_hierarchical_allreduce
        inner = strategy.hierarchical_allreduce_inter_nranks if by_levels else None
        self._dgc.senders = len(senders(group, inner))

    def receive(self, means: Mapping[str, Tensor]) -> None:
        self._refuse_second()
        self.correct(means)

    @torch.no_grad()
    def correct(self, means: Mapping[str, Tensor]) -> None:
        """Turn each mean into the gradient that makes the optimizer move by it."""
        self._check_optimizers()
        self._check_owners(means)
        for name, mean in means.items():
            to_gradient(mean, self.momentum_of(name))

    def _refuse_second(self) -> None:
        """PlanError for a second reduction in one step: momentum would accumulate twice."""
        stepped = next(p.reductions_at_step for p in self._job.models if p.module is self._module)
        if stepped == self._reduced_at:
            raise PlanError(
                "dgc: the gradients of a model were reduced twice for one step of its optimizer, "
                "but each reduction accumulates momentum. Run the other backwards of a step inside "
                "fleet.no_sync(), or set gradient_merge. Step after every reduction: to skip a "
                "step, decide so before backward, on all workers. Detach tensors that only pass "
                "through the model"
            )
        self._reduced_at = stepped

    def momentum_of(self, name: str) -> Momentum:
        """The momentum with which the optimizer steps a parameter."""
        parameter = self._parameters[name]
        optimizer, number = self._owners.get(id(parameter), (None, 0))
        if optimizer is None:
            return Momentum(parameter)  # in no optimizer
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
            for optimizer, number, parameter in self._stepped_parameters()
            if isinstance(optimizer, torch.optim.SGD)
        }

    def _stepped_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, int, Tensor]]:
        """Each parameter of the optimizers, with its optimizer and the number of its group."""
        for managed in self._job.optimizers:
            for number, group in enumerate(managed.optimizer.param_groups):
                for parameter in group["params"]:
                    yield managed.optimizer, number, parameter

    def _check_owners(self, names: Iterable[str]) -> None:
        """PlanError for a gradient that was encoded without the momentum of its optimizer."""
        stepped = {id(parameter) for _, _, parameter in self._stepped_parameters()}
        for name in names:
            number = id(self._parameters[name])
            if number in stepped and number not in self._owners:
                raise PlanError(
                    f"dgc: the parameter {name} was added to an optimizer while its gradient was "
                    "being reduced; add parameters before backward or after the step"
                )

    def _check_optimizers(self) -> None:
        """Check at each step: the script may register late, or set momentum to zero."""
        for managed in self._job.optimizers:
            check_optimizer(managed.optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """PlanError unless the optimizer is SGD with momentum, which DGC corrects."""
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
    """True when the job compresses its gradients by DGC."""
    group = job.collective_group
    if not job.strategy.dgc or group is None or group.alone:
        return False
    return crosses_a_link(group, job.strategy.shared_memory)


def clipping_error(got: str) -> PlanError:
    """The error for a clip between backward and step, where gradients contain momentum."""
    return PlanError(
        f"{got}: with strategy.dgc gradients contain momentum after backward, so they cannot be "
        "clipped; set strategy.dgc_configs.local_grad_clip_norm, which clips what a worker sends"
    )
