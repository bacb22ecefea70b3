# SPDX-License-Identifier: Apache-2.0
"""`ManagedOptimizer`: a registered torch optimizer, whose steps the workers make together."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.fleet.training.gradient_merge import MergedGradients
from fleetlight.observe.telemetry.step_times import OPTIMIZER, step_times
from fleetlight.static.graph.variable import is_variable
from fleetlight.torch_compat.compiler.lazy_dynamo import late_step
from fleetlight.torch_compat.optimizers import is_watched
from fleetlight.torch_compat.tensors import version
from fleetlight.torch_compat.used_graphs import (
    backwards_so_far,
    has_gone_backward,
    is_older,
    is_used,
    nodes_so_far,
    watch_backwards,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fleetlight.collective.local_training.engine import LocalTrainingEngine
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class StepPolicy(Protocol):
    """How a registered optimizer steps; its job chooses the policy."""

    @property
    def local_steps(self) -> LocalSteps | None:
        """How a worker makes its steps alone, if it ever does."""

    @property
    def steps_on_servers(self) -> int | None:
        """How many steps it has made on the servers; None where workers step."""

    def count_on_servers(self, steps: int) -> None:
        """Set how many steps it has made on the servers."""

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        """Let local training continue from the values of a checkpoint."""

    def update_trained(self, model: RegisteredModel) -> None:
        """Before a forward of the model: agree again if other parameters are trained now."""

    def begin(self) -> None:
        """Apply the strategy when training begins; once."""

    def make_ready(self) -> None:
        """Reduce the gradients of all workers and of all merged backwards."""

    def before(self, args: Any, kwargs: Any) -> Any:
        """Runs before torch's own step; may return other arguments for it."""

    def after(self) -> None:
        """Runs after torch's own step."""

    def register(self, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""

    def distribute(self, program: Program) -> None:
        """Rewrite a finished program according to the strategy."""

    def release(self) -> None:
        """Restore the optimizer as it was."""


class ManagedOptimizer:
    """A registered optimizer, whose steps use reduced gradients.

    Hooks suffice for that. But `step` is also wrapped, as torch's schedulers wrap it, since the
    first forward or step decides whether several steps make one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job,
        policy: Callable[[ManagedOptimizer], StepPolicy],
    ) -> None:
        self.optimizer = optimizer
        self.job = job
        self._scaler: torch.amp.GradScaler | None = None
        self._frozen = False
        self.merge: MergedGradients | None = None
        #: the last program that makes its steps, if one does
        self.program: Program | None = None
        #: all such programs that still exist
        self.programs: weakref.WeakSet[Program] = weakref.WeakSet()
        #: the number of graph nodes on this thread, and of backwards, at its last step
        self._nodes_at_step = 0
        self._backwards_at_step = 0
        #: the first gradient of the last minimized loss, and its version
        self._minimized: tuple[weakref.ref[Tensor], tuple[int, int]] | None = None
        watch_backwards()
        self._is_released = False
        self._step_before: Any = optimizer.__dict__.get("step")
        self._wrap_step()
        self.policy = policy(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        optimizer.minimize = self._minimize  # type: ignore[attr-defined]
        # static programs look for it
        optimizer.distributor = self  # type: ignore[attr-defined]

    @property
    def local_steps(self) -> LocalSteps | None:
        return self.policy.local_steps

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        self.policy.resume_local(load)

    def update_trained(self, model: RegisteredModel) -> None:
        self.policy.update_trained(model)

    @property
    def steps_on_servers(self) -> int | None:
        return self.policy.steps_on_servers

    def count_on_servers(self, steps: int) -> None:
        self.policy.count_on_servers(steps)

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> Any:
        return self.policy.before(args, kwargs)

    def _after_step(self, *_: Any) -> None:
        self.policy.after()

    def register(self, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""
        return self.policy.register(program)

    def distribute(self, program: Program) -> None:
        """Rewrite a finished program according to the strategy."""
        self.policy.distribute(program)

    def freeze(self) -> None:
        """Apply the strategy as it is when training begins; once."""
        if self._frozen:
            return
        self._frozen = True
        strategy = self.job.strategy
        if strategy.gradient_merge and strategy.gradient_merge_configs.k_steps > 1:
            self.merge = MergedGradients(self.optimizer, self.job)
        self.policy.begin()

    def _wrap_step(self) -> None:
        original = self.optimizer.step
        step = late_step(self.optimizer)

        @functools.wraps(getattr(original, "__func__", original))
        def wrapped(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_released:
                return step(*args, **kwargs)
            if closure_in((self.optimizer, *args), kwargs) is None:
                self._refuse_second_step()
            before = step_times.enter(OPTIMIZER)
            try:
                self.freeze()
                if self.merge is None:
                    return step(*args, **kwargs)
                return self.merge.step(step, args, kwargs)
            finally:
                self.note_step()
                step_times.leave(before)

        # torch's schedulers expect a bound method to wrap
        self._wrapped_step = types.MethodType(wrapped, self.optimizer)
        self.optimizer.step = self._wrapped_step  # type: ignore[method-assign]

    def note_step(self) -> None:
        """Note where in the course of backwards the last step was made."""
        self._nodes_at_step, self._backwards_at_step = nodes_so_far(), backwards_so_far()

    @property
    def is_watched(self) -> bool:
        """True when the script's hooks, or a wrapper around `step`, learn of its steps."""
        return is_watched(self.optimizer, self._wrapped_step, len(self._hooks))

    def release(self) -> None:
        """Restore the optimizer as it was; a scheduler may have wrapped its step since."""
        self._is_released = True
        self.policy.release()
        for hook in self._hooks:
            hook.remove()
        own = self.optimizer.__dict__
        if own.get("step") is self._wrapped_step:
            del own["step"]
            if self._step_before is not None:
                own["step"] = self._step_before
        for name in ("minimize", "distributor"):
            own.pop(name, None)

    @property
    def scalers(self) -> list[torch.amp.GradScaler]:
        """The scalers that may step it: its own, which `minimize` uses, and the attached ones."""
        return [*([] if self._scaler is None else [self._scaler]), *self.job.scalers]

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaler that `minimize` or a program uses, if there is one."""
        if self.program is not None:
            from fleetlight.static.graph import schedule

            return schedule.scaler_state(self.program.state)
        return None if self._scaler is None else self._scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Restore the loss scale."""
        if self.program is not None:
            from fleetlight.static.graph import schedule

            for program in self.programs:
                schedule.load_scaler_state(program.state, state)
            return
        scaler = self._scaler_or_none()
        if scaler is not None and state:
            scaler.load_state_dict(state)

    def restart_merge(self) -> None:
        """Drop the merged gradients of an unfinished step, since other values were loaded."""
        if self.merge is not None:
            self.merge.restart()
        for program in self.programs:
            program.form.schedule.restart(program.state)

    def _minimize(self, loss: Tensor, *_: Any, **clip: float | None) -> None:
        """Run backward and step, under Fleet's name; the caller still calls `zero_grad`.

        Only the step where the script has called `loss.backward()` itself, as Fleet's scripts do,
        also with a retained graph. Of a static program's loss, backward and step are written into
        the program, with `clip_norm` or `clip_value`.
        """
        if is_variable(loss):
            from fleetlight import static

            static.minimize(self.optimizer, loss, **clip)
            return
        if clip:
            raise PlanError(
                f"minimize: got {', '.join(clip)}, which is for static programs; in an eager loop "
                "call backward(), fleet.clip_grad_norm_(model, max_norm) and step()"
            )
        if not isinstance(loss, Tensor):
            raise PlanError(
                f"minimize: got a {type(loss).__name__}, expected the loss as a tensor, on which "
                "backward() can be called"
            )
        self.freeze()
        self._minimized = None
        self._step_by(loss, self._scaler_or_none())
        gradient = self._first_gradient()
        if gradient is not None:
            # by weakref: after zero_grad another tensor may have its address
            self._minimized = weakref.ref(gradient), self._writes(gradient)

    def _refuse_second_step(self) -> None:
        """PlanError for a step with gradients that `minimize` has applied already."""
        if self._minimized is None:
            return
        gradient, writes = self._minimized
        now = self._first_gradient()
        if now is not None and now is gradient() and self._writes(now) == writes:
            raise PlanError(
                "optimizer.step was called after minimize(loss), which has made the step with "
                "these gradients already: remove optimizer.step(), and call zero_grad()"
            )

    @staticmethod
    def _writes(gradient: Tensor) -> tuple[int, int]:
        """A version of a gradient; adding rows in backward does not change the tensor's own."""
        return version(gradient), backwards_so_far()

    def _first_gradient(self) -> Tensor | None:
        """The gradient of the first parameter that has one."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return next((p.grad for p in parameters if p.grad is not None), None)

    def _step_by(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Run backward, unless the script has called it, and a step."""
        if has_gone_backward(loss) or is_used(loss):
            self._check_used(loss, scaler)
            self.optimizer.step()
            return
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.merge is not None and self.merge.is_between():
            self.optimizer.step()  # only counts; the scaler steps after the last backward of k
            return
        # all workers must find the same infinities
        self.policy.make_ready()
        with contextlib.nullcontext() if self.merge is None else self.merge.last_step():
            scaler.step(self.optimizer)
        scaler.update()

    def _check_used(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """PlanError unless the gradients of a loss that was used belong to the next step."""
        if scaler is not None:
            raise PlanError(
                "minimize: loss.backward() has already been called, but with amp and float16 "
                "minimize scales the loss before its backward; remove loss.backward()"
            )
        if self._has_stepped_since(loss):
            raise PlanError(
                "minimize: backward of this loss has already run, and this optimizer has stepped "
                "since the loss was computed; compute the loss again, and call minimize(loss) once"
            )
        if all(p.grad is None for group in self.optimizer.param_groups for p in group["params"]):
            raise PlanError(
                "minimize: backward of this loss has already run, but no parameter of this "
                "optimizer has a gradient; call zero_grad() before loss.backward(), not between it "
                "and minimize(loss)"
            )

    def _has_stepped_since(self, loss: Tensor) -> bool:
        """True when the optimizer has stepped since the backward of a loss."""
        done = has_gone_backward(loss)
        return done <= self._backwards_at_step if done else is_older(loss, self._nodes_at_step)

    def _scaler_or_none(self) -> torch.amp.GradScaler | None:
        """The scaler of `minimize`: float16 needs one, bfloat16 has the range of float32."""
        strategy = self.job.strategy
        if not strategy.amp or strategy.amp_configs.dtype != "float16":
            return None
        if self._scaler is None:
            configs = strategy.amp_configs
            self._scaler = torch.amp.GradScaler(
                self.optimizer.param_groups[0]["params"][0].device.type,
                init_scale=configs.init_loss_scaling,
                growth_interval=2000 if configs.use_dynamic_loss_scaling else 1 << 30,
            )
        return self._scaler


def closure_in(args: Any, kwargs: Any) -> Any:
    """The closure that a step was called with, if there was one."""
    # torch passes the optimizer to its hooks as the first argument
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
    """The arguments of a step, with another closure."""
    return (args[0], closure), {k: v for k, v in kwargs.items() if k != "closure"}
