# SPDX-License-Identifier: Apache-2.0
"""`ManagedModel`: a registered model, on which the workers agree at its first forward."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fleetlight.collective.buckets import BucketLimits
from fleetlight.collective.codecs.codec import narrow_type
from fleetlight.collective.data_parallel.batch_norm import normalise_alone, synchronise_batch_norm
from fleetlight.collective.data_parallel.late_gradients import Cause
from fleetlight.collective.data_parallel.replica import Reduction, Replica
from fleetlight.collective.group import Group
from fleetlight.collective.local_training.outer import Means
from fleetlight.collective.stamp import UNKNOWN, Position
from fleetlight.errors import DeadlineError, PlanError, did_you_mean, first_names
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.compression import compression_of
from fleetlight.fleet.training.consistency import settings_of, terms_of
from fleetlight.fleet.training.local_training import chosen
from fleetlight.fleet.training.worker_seeds import ForwardWatcher, derive_worker_seeds
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.step_times import FORWARD, step_times
from fleetlight.static.graph.variable import is_written
from fleetlight.strategy import DistributedStrategy, current_job
from fleetlight.torch_compat.modules import BatchNorm, wrappers_in, wrappers_of
from fleetlight.torch_compat.tensors import tree_map

#: the number of names in a line
_NAMED = 3


def warn_at_start(module: nn.Module, job: Job) -> None:
    """Warn on worker 0; the model is equal on all workers."""
    if job.group.index == 0:
        for line in _warnings(module, job):
            logger.warning("%s", line)


def _warnings(module: nn.Module, job: Job) -> Iterator[str]:
    optimizers = [managed.optimizer for managed in job.optimizers]
    if idle := untrained(module, optimizers):
        yield (
            f"{first_names(idle, _NAMED)}: in no optimizer given to fleet.distributed_optimizer, "
            "so no step trains them; add them to one, or call requires_grad_(False) on them"
        )


def untrained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Parameters that require a gradient but are in no optimizer; none without optimizers."""
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not optimizers:
        return []
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]


def report_batch_norm(module: nn.Module, job: Job) -> None:
    """Note on worker 0 that batch norm uses each worker's own batch, where a setting changes that.

    Called at the first training forward, when the layers are in training mode.
    """
    strategy, facts = job.strategy, current_job()
    if job.group.index:
        return
    sums = facts.is_collective or strategy.a_sync_configs.dense == "allreduce"
    if job.group.alone or not sums or strategy.sync_batch_norm or chosen(strategy):
        return
    norms = [m for m in module.modules() if isinstance(m, BatchNorm) and m.training]
    local = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]
    if local:
        logger.info(
            "batch norm: %d layers use the statistics of their own worker's batch; "
            "strategy.sync_batch_norm = True uses the batches of all workers",
            len(local),
        )


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Keep gradients local inside the block; the next backward outside reduces their sum.

    Yields:
        Nothing.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> with fleet.no_sync():
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.bias.grad
        tensor([2.])
    """
    job = current()
    job.no_sync_depth += 1
    try:
        yield
    finally:
        job.no_sync_depth -= 1


@contextlib.contextmanager
def as_plain_module(module: nn.Module) -> Iterator[None]:
    """Give the module its own `forward` inside the block, as torch.export needs it."""
    entry = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if entry is not None:
            module.__dict__["forward"] = entry


class ModelPolicy(Protocol):
    """How a registered model is trained; its job chooses the policy."""

    #: False for a program, which replaces the calls of its module
    watches_calls: ClassVar[bool]

    def agree(self, model: ManagedModel) -> None:
        """At the first forward: compare the model on all workers, and set equal values."""

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward of the module, and prepare the backward that may follow."""

    def weight(self, model: ManagedModel) -> float:
        """The weight of the next batch's gradients."""

    def means(self, model: ManagedModel) -> Means | None:
        """What averages the model's tensors over the workers, once they have agreed on it."""

    def close(self) -> None:
        """Release the model."""


class ManagedModel:
    """A registered model, before and after the workers have agreed on it."""

    def __init__(self, module: nn.Module, job: Job, policy: ModelPolicy) -> None:
        self.module, self.job, self.policy = module, job, policy
        #: reduces the gradients of the model among workers, where no server does
        self.replica: Replica | None = None
        #: the number of reductions before the last optimizer step
        self.reductions_at_step = 0
        #: of the current batch
        self.batch_weight, self.position = 1.0, UNKNOWN
        self.frozen = False
        #: True from the first forward that trains, or the first step
        self._has_begun = False
        #: True when a program has registered it, not the script
        self.is_from_program = False
        self._recomputed: Replaced = []
        #: derives the worker's seeds where a script calls parts before the model itself
        self._watcher: ForwardWatcher | None = None
        self._forward = module.forward
        self._entry = ForwardEntry(self, self._forward)
        self._install_entry()

    def _install_entry(self) -> None:
        if not self.policy.watches_calls:
            return
        self.module.forward = self._entry
        # worker 0 keeps the seeds of the script
        if self.job.group.index and not self._has_begun:
            derive = functools.partial(derive_worker_seeds, self.job)
            self._watcher = ForwardWatcher(self.module, derive)

    def _remove_entry(self) -> None:
        if self.policy.watches_calls:
            self.module.__dict__.pop("forward", None)
            self._close_watcher()

    def set_policy(self, policy: ModelPolicy) -> None:
        """Train by another policy from now on; the workers must agree again."""
        self.close()
        self.policy, self.frozen = policy, False
        self._install_entry()

    def _close_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def replace_module(self, module: nn.Module) -> None:
        """Manage a module that contains the one so far."""
        self._remove_entry()
        self.module, self._forward = module, module.forward
        self._entry = ForwardEntry(self, self._forward)
        self.is_from_program = False
        self._install_entry()

    def freeze(self) -> None:
        """Agree on the model with the other workers and apply the strategy; once."""
        if self.frozen:
            return
        if not self.policy.watches_calls:
            self.policy.agree(self)
            self.frozen = True
            return
        self.frozen = True
        for optimizer in self.job.optimizers:
            optimizer.freeze()
        strategy = self.job.strategy
        try:
            if not self.job.group.alone:
                _refuse_wrappers(wrappers_in(self.module))
            self.policy.agree(self)
        except Exception:
            # the next forward raises it again
            self.frozen = False
            raise
        if strategy.recompute:
            self._recomputed = _recompute(self.module, strategy.recompute_configs.checkpoints)
        self._renew_entry()
        warn_at_start(self.module, self.job)
        if self.job.autosave is not None:
            self.job.autosave.resume()

    def warn_of_other_device(self) -> None:
        """Warn of a model on the CPU where this worker has a GPU."""
        kinds = {parameter.device.type for parameter in self.module.parameters()}
        mine = self.job.group.device
        if mine.type == "cuda" and kinds == {"cpu"}:
            logger.warning(
                "this worker has %s, but the model is on the CPU: move it with model.cuda() before "
                "you make the optimizer",
                mine,
            )

    @property
    def dense_group(self) -> Group:
        """The workers that average the gradients of dense parameters."""
        group = self.job.dense_group
        assert group is not None
        return group

    def replicate(self, late: Cause = Cause.UNCALLED) -> None:
        """Reduce its gradients during backward from now on; every worker calls it."""
        strategy, group = self.job.strategy, self.dense_group
        self.replica = Replica(
            self.module,
            group,
            reduction_of(self.job, self.module),
            settings=settings_of(self.job),
            terms=functools.partial(terms_of, self.job),
            broadcast_buffers=strategy.broadcast_buffers,
        )
        # the script may have trained a part of it before its first forward
        self.replica.mark_unreduced(late)
        self.set_batch_weight(self.batch_weight, self.position)
        if strategy.sync_batch_norm:
            # the model itself may be a batch norm, whose forward the entry replaces
            with as_plain_module(self.module):
                synchronise_batch_norm(self.module, group, self.replica.reducer)
                self._forward = self.module.__dict__.get("forward", self._forward)

    def _renew_entry(self) -> None:
        """Let the entry call the present forward, under autocast if the strategy asks for it."""
        strategy, forward = self.job.strategy, self._forward
        if strategy.amp:
            dtype = getattr(torch, strategy.amp_configs.dtype)
            device = next((p.device for p in self.module.parameters()), self.job.group.device)
            forward = _autocast(forward, device.type, dtype)
        self._entry.inner = forward

    def check_caller(self) -> None:
        """PlanError if another library reduces the gradients of the next backward."""
        if not self.job.group.alone:
            _refuse_wrappers(wrappers_of(self.module))

    def begin_forward(self) -> None:
        """Prepare a forward; one that trains draws different random numbers on each worker."""
        if _trains(self.module):
            self.begin_training()

    def begin_training(self) -> None:
        """Prepare for the first forward that trains, or the first step; programs do it alone."""
        if not self.policy.watches_calls:
            return
        derive_worker_seeds(self.job)
        if self._has_begun or not _trains(self.module):
            return
        self._has_begun = True
        self._close_watcher()
        report_batch_norm(self.module, self.job)

    def rebuild_replica(self) -> None:
        """Agree again after parameters were added, frozen or unfrozen; every worker calls it."""
        if self.replica is not None:
            done = self.replica.reductions
            self.replica.close()
            self.replicate(Cause.CHANGED)
            # the count continues, so that no earlier use counts as a new one
            self.replica.reductions = done + 1
            self._renew_entry()

    def set_batch_weight(self, weight: float, position: Position = UNKNOWN) -> None:
        """Set the weight of this worker's next gradients, usually 1, and their position."""
        self.batch_weight, self.position = weight, position
        if self.replica is not None:
            self.replica.reducer.weight = weight
            self.replica.position = position

    @property
    def weight(self) -> float:
        """The weight of the next batch's gradients."""
        return self.policy.weight(self)

    @property
    def reduces(self) -> bool:
        """True when the next backward reduces its gradients."""
        return not self.job.no_sync_depth and not self.trains_locally

    @property
    def trains_locally(self) -> bool:
        """True while this worker steps the model without the others."""
        return local_training.trains_locally(self.job, self)

    @property
    def means(self) -> Means | None:
        """What averages the model's tensors over the workers, once they have agreed on it."""
        return self.policy.means(self)

    def has_any_of(self, parameters: Iterable[Tensor]) -> bool:
        """True when some of these are parameters of the model."""
        mine = {id(p) for p in self.module.parameters()}
        return any(id(p) in mine for p in parameters)

    def broadcast_buffers(self) -> None:
        """Give all workers the buffers of worker 0."""
        if self.job.strategy.broadcast_buffers:
            self.job.group.broadcast(list(self.module.buffers()), "buffers of the model")

    def close(self) -> None:
        """Give the module its own forward back."""
        self._remove_entry()
        self.policy.close()
        _undo_recompute(self._recomputed)
        self._recomputed = []
        if self.replica is not None:
            normalise_alone(self.module)
            self.replica.close()
            self.replica = None


@contextlib.contextmanager
def explain_deadline(hint: str) -> Iterator[None]:
    """Add a hint to the DeadlineError of a wait for all workers."""
    try:
        yield
    except DeadlineError as error:
        raise DeadlineError(f"{error}. {hint}") from None


class ForwardEntry:
    """Replaces the module's `forward`, so that every call runs by the policy.

    A deep copy or a pickle of the module, such as a moving average, has its plain forward.
    """

    def __init__(self, model: ManagedModel, forward: Any) -> None:
        self.inner = forward
        self._model = model
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_written(args, kwargs):
            # a program captures what the module itself computes
            return self.inner(*args, **kwargs)
        model = self._model
        before = step_times.enter(FORWARD)
        try:
            model.check_caller()
            model.freeze()
            model.begin_forward()
            return model.policy.run(model, self.inner, args, kwargs)
        finally:
            step_times.leave(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo[id(self._model.module)])

    def __reduce__(self) -> Any:
        return _plain_forward, (self._model.module,)


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def reduction_of(job: Job, module: nn.Module | None = None) -> Reduction:
    """The strategy's settings for the reduction of gradients, those of a model if given."""
    strategy = job.strategy
    return Reduction(
        limits=BucketLimits.of(
            fuse=strategy.fuse_all_reduce_ops,
            mib=strategy.fuse_grad_size_in_MB,
            count=strategy.fuse_grad_size_in_num,
        ),
        narrow=_narrow(strategy),
        compression=None if module is None else compression_of(job, module),
        average=job.averages,
        synchronous=strategy.sync_nccl_allreduce,
        communicators=strategy.nccl_comm_num,
        shared_memory=strategy.shared_memory,
        inner=(
            strategy.hierarchical_allreduce_inter_nranks
            if strategy.use_hierarchical_allreduce
            else None
        ),
        find_unused=strategy.find_unused_parameters,
    )


def _narrow(strategy: DistributedStrategy) -> torch.dtype | None:
    """The type in which values travel, if the strategy asks for one."""
    asked = narrow_type(strategy.fp16_allreduce) or narrow_type(strategy.compression)
    # float16 rounds the movements of a small learning rate to zero
    moves = asked is torch.float16 and local_training.chosen(strategy) is not None
    return torch.bfloat16 if moves else asked


def _trains(module: nn.Module) -> bool:
    """Read the mode past the attribute: a program in the making notes each access to that."""
    return bool(vars(module)["training"])


#: a module, the forward that an earlier call had set, or None, and ours
Replaced = list[tuple[nn.Module, Any, Any]]


def _recompute(module: nn.Module, names: list[str]) -> Replaced:
    """Let the named modules compute their activations again in backward."""
    from torch.utils.checkpoint import checkpoint

    given_back: Replaced = []
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise PlanError(
                f"recompute_configs.checkpoints: the model has no module {name!r}; "
                f"{did_you_mean(name, filter(None, known))}"
            )
        child = known[name]
        own = functools.partial(checkpoint, child.forward, use_reentrant=False)
        given_back.append((child, child.__dict__.get("forward"), own))
        child.forward = own
    logger.info("recompute: %d modules keep no activations", len(names))
    return given_back


def _undo_recompute(replaced: Replaced) -> None:
    """Undo `_recompute`, except on modules whose forward was replaced since."""
    for child, before, ours in reversed(replaced):
        if child.__dict__.get("forward") is ours:
            del child.__dict__["forward"]
            if before is not None:
                child.forward = before


def _autocast(inner: Any, device: str, dtype: torch.dtype) -> Any:
    """Wrap a forward in autocast; its outputs are float32 again, for the loss."""

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            output = inner(*args, **kwargs)
        return tree_map(_as_float, output)

    return forward


def _as_float(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


def _refuse_wrappers(found: Iterable[str]) -> None:
    """Refuse a registered model that another library distributes too.

    Accelerate, Lightning and the Trainer of transformers wrap a model in torch's
    DistributedDataParallel when they find several processes.
    """
    for name in found:
        raise PlanError(
            f"the model is registered by fleet.distributed_model, and {name} distributes it too: "
            "gradients would be reduced twice. Drop one of them: the line that wraps the model "
            "(with Accelerate accelerator.prepare(model), with the Trainer of transformers its "
            "training loop; docs/migrating.md, 'Accelerate, the Trainer and Lightning', shows what "
            "to write instead), or "
            "fleet.distributed_model(model) and fleet.distributed_optimizer(optimizer)"
        )
