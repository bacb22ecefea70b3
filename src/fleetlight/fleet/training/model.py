# SPDX-License-Identifier: Apache-2.0
"""A registered model; at its first forward the workers agree on it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
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
from fleetlight.errors import DeadlineError, PlanError, did_you_mean
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.compression import compression_of
from fleetlight.fleet.training.consistency import settings_of, terms_of
from fleetlight.fleet.training.start_notes import tell_of_batch_norm, tell_start
from fleetlight.fleet.training.worker_seeds import Parts, make_distinct
from fleetlight.observe.log import logger
from fleetlight.static.graph.variable import is_written
from fleetlight.strategy import DistributedStrategy
from fleetlight.torch_compat.modules import wrappers_in, wrappers_of
from fleetlight.torch_compat.tensors import tree_map


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Inside the block gradients stay local and add up; the next backward outside reduces them."""
    job = current()
    job.no_sync_depth += 1
    try:
        yield
    finally:
        job.no_sync_depth -= 1


@contextlib.contextmanager
def as_plain_module(module: nn.Module) -> Iterator[None]:
    """Inside the block the module has its own `forward`, as torch.export wants it."""
    entry = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if entry is not None:
            module.__dict__["forward"] = entry


class ModelPolicy(Protocol):
    """How a registered model is trained: one for each model, chosen by its job."""

    #: True where calls of the module go by the plan; a program computes what its module does
    watches_calls: ClassVar[bool]

    def agree(self, plan: ModelPlan) -> None:
        """At the first forward: the workers agree on the model, and begin with the same values."""

    def run(self, plan: ModelPlan, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward of the module, prepared for the backward that may follow."""

    def weight(self, plan: ModelPlan) -> float:
        """What the gradients of the coming batch weigh."""

    def means(self, plan: ModelPlan) -> Means | None:
        """Who takes means over the workers for the model, once they have agreed on it."""

    def close(self) -> None:
        """Let go of the model."""


class ModelPlan:
    """A registered model, before and after the workers have agreed on it."""

    def __init__(self, module: nn.Module, job: Job, policy: ModelPolicy) -> None:
        self.module, self.job, self.policy = module, job, policy
        #: reduces the gradients of the model among workers, where they do that themselves
        self.replica: Replica | None = None
        #: how many reductions there had been when an optimizer stepped last
        self.stepped = 0
        #: what the batch in hand weighs, and where it comes from
        self.batch_weight, self.position = 1.0, UNKNOWN
        self.frozen = False
        #: True from the first forward that trains, or the first step
        self._has_begun = False
        #: True when a program has registered it, and no line of the script
        self.of_program = False
        #: what a program's parts were called in checkpoints of older versions, and are called now
        self.former_names: dict[str, str] = {}
        self._recomputed: Replaced = []
        #: who draws other random numbers where parts are called before the model itself
        self._parts: Parts | None = None
        self._forward = module.forward
        self._entry = ForwardEntry(self, self._forward)
        self._stand_in()

    def _stand_in(self) -> None:
        if not self.policy.watches_calls:
            return
        self.module.forward = self._entry
        # worker 0 goes on with the seeds of the script
        if self.job.group.index and not self._has_begun:
            self._parts = Parts(self.module, functools.partial(make_distinct, self.job))

    def _step_aside(self) -> None:
        if self.policy.watches_calls:
            self.module.__dict__.pop("forward", None)
            self._look_at_no_parts()

    def become(self, policy: ModelPolicy) -> None:
        """Be trained in another way from now on; what it has agreed on is forgotten."""
        self.close()
        self.policy, self.frozen = policy, False
        self._stand_in()

    def _look_at_no_parts(self) -> None:
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def widen(self, module: nn.Module) -> None:
        """Stand for a module that has all of the one so far."""
        self._step_aside()
        self.module, self._forward = module, module.forward
        self._entry = ForwardEntry(self, self._forward)
        self.of_program = False
        self._stand_in()

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
            # the next forward says so again
            self.frozen = False
            raise
        if strategy.recompute:
            self._recomputed = _recompute(self.module, strategy.recompute_configs.checkpoints)
        self._renew_entry()
        tell_start(self.module, self.job)
        if self.job.stopping is not None:
            self.job.stopping.take_up()

    def warn_of_other_device(self) -> None:
        """Of a model on the CPU beside a GPU that this worker has."""
        kinds = {parameter.device.type for parameter in self.module.parameters()}
        mine = self.job.group.device
        if mine.type == "cuda" and kinds == {"cpu"}:
            logger.warning(
                "this worker has %s, but the model is on the CPU: move it with model.cuda() before "
                "the optimizer is made",
                mine,
            )

    @property
    def dense_group(self) -> Group:
        """The workers that average the gradients of dense parameters."""
        group = self.job.dense_group
        assert group is not None
        return group

    def replicate(self, late: Cause = Cause.UNCALLED) -> None:
        """Let its gradients be reduced during backward from now on; all workers come here."""
        strategy, group = self.job.strategy, self.dense_group
        self.replica = Replica(
            self.module,
            group,
            reduction_of(self.job, self.module),
            settings=settings_of(self.job),
            terms=functools.partial(terms_of, self.job),
            broadcast_buffers=strategy.broadcast_buffers,
        )
        # a part of it may have been trained before its own forward was called
        self.replica.mark_unreduced(late)
        self.weigh(self.batch_weight, self.position)
        if strategy.sync_batch_norm:
            # the whole model may be one batch norm, whose forward the entry stands in for
            with as_plain_module(self.module):
                synchronise_batch_norm(self.module, group, self.replica.reducer)
                self._forward = self.module.__dict__.get("forward", self._forward)

    def _renew_entry(self) -> None:
        """The entry calls the forward as it is now, narrow if the strategy says so."""
        strategy, forward = self.job.strategy, self._forward
        if strategy.amp:
            dtype = getattr(torch, strategy.amp_configs.dtype)
            forward = _autocast(forward, self.job.group.device.type, dtype)
        self._entry.inner = forward

    def check_caller(self) -> None:
        """Nobody else may reduce the gradients of the coming backward."""
        if not self.job.group.alone:
            _refuse_wrappers(wrappers_of(self.module))

    def draw_apart(self) -> None:
        """A forward that trains draws other random numbers on each worker."""
        if _trains(self.module):
            self.begin()

    def begin(self) -> None:
        """A forward that trains, or a step, is about to be made; programs say so themselves."""
        if not self.policy.watches_calls:
            return
        make_distinct(self.job)
        if self._has_begun or not _trains(self.module):
            return
        self._has_begun = True
        self._look_at_no_parts()
        tell_of_batch_norm(self.module, self.job)

    def replicate_again(self) -> None:
        """Parameters were added, frozen or unfrozen: agree anew. All workers come here alike."""
        if self.replica is not None:
            done = self.replica.reductions
            self.replica.close()
            self.replicate(Cause.CHANGED)
            # the count goes on, so that what was used before is not taken for used again
            self.replica.reductions = done + 1
            self._renew_entry()

    def weigh(self, weight: float, position: Position = UNKNOWN) -> None:
        """What the coming gradients of this worker weigh, 1 usually, and where they come from."""
        self.batch_weight, self.position = weight, position
        if self.replica is not None:
            self.replica.reducer.weight = weight
            self.replica.position = position

    @property
    def weight(self) -> float:
        """What the gradients of the coming batch weigh."""
        return self.policy.weight(self)

    @property
    def reduces(self) -> bool:
        """True when the coming backward is to be reduced."""
        return not self.job.no_sync_depth and not self.trains_alone

    @property
    def trains_alone(self) -> bool:
        """True while this worker makes steps of its own with the model."""
        return local_training.trains_alone(self.job, self)

    @property
    def means(self) -> Means | None:
        """Who takes means over the workers for it, once they have agreed on it."""
        return self.policy.means(self)

    def has_any_of(self, parameters: Iterable[Tensor]) -> bool:
        """True when some of these are parameters of the model."""
        mine = {id(p) for p in self.module.parameters()}
        return any(id(p) in mine for p in parameters)

    def share_buffers(self) -> None:
        """Give worker 0's buffers to everybody."""
        if self.job.strategy.broadcast_buffers:
            self.job.group.broadcast(list(self.module.buffers()), "buffers of the model")

    def close(self) -> None:
        """Let go of the module; its forward is its own again."""
        self._step_aside()
        self.policy.close()
        _keep_again(self._recomputed)
        self._recomputed = []
        if self.replica is not None:
            normalise_alone(self.module)
            self.replica.close()
            self.replica = None


@contextlib.contextmanager
def saying_who_meets(hint: str) -> Iterator[None]:
    """Where somebody does not come in time, say when all are to come."""
    try:
        yield
    except DeadlineError as error:
        raise DeadlineError(f"{error}. {hint}") from None


class ForwardEntry:
    """Stands in for the module's `forward`, so that calls of any kind pass by the plan.

    A deep copy or a pickle of the module, such as a moving average, gets its plain forward.
    """

    def __init__(self, plan: ModelPlan, forward: Any) -> None:
        self.inner = forward
        self._plan = plan
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_written(args, kwargs):
            # a program takes down what the module itself computes
            return self.inner(*args, **kwargs)
        self._plan.check_caller()
        self._plan.freeze()
        self._plan.draw_apart()
        return self._plan.policy.run(self._plan, self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo[id(self._plan.module)])

    def __reduce__(self) -> Any:
        return _plain_forward, (self._plan.module,)


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def reduction_of(job: Job, module: nn.Module | None = None) -> Reduction:
    """What the strategy says about the reduction of gradients, those of a model if one is given."""
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
    """The type that values travel in, if a strategy asks for one."""
    asked = narrow_type(strategy.fp16_allreduce) or narrow_type(strategy.compression)
    # to float16, what a small learning rate moves parameters by is nothing
    moves = asked is torch.float16 and local_training.chosen(strategy) is not None
    return torch.bfloat16 if moves else asked


def _trains(module: nn.Module) -> bool:
    """Not by the attribute: a program that is being written notes who looks at that."""
    return bool(vars(module)["training"])


#: a module, the forward that was put on it before, if one was, and ours
Replaced = list[tuple[nn.Module, Any, Any]]


def _recompute(module: nn.Module, names: list[str]) -> Replaced:
    """The named modules compute their activations again in backward."""
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


def _keep_again(replaced: Replaced) -> None:
    """The modules keep their activations, where nobody else has changed them since."""
    for child, before, ours in reversed(replaced):
        if child.__dict__.get("forward") is ours:
            del child.__dict__["forward"]
            if before is not None:
                child.forward = before


def _autocast(inner: Any, device: str, dtype: torch.dtype) -> Any:
    """Autocast around a forward; what comes out is float32 again, for the loss."""

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
    """Refuse a registered model that another library distributes too: gradients travel once.

    Torch's DistributedDataParallel, and Accelerate, Lightning and the Trainer of transformers with
    it, wrap a model when they find several processes.
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
