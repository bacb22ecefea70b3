# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a forward that torch.utils.checkpoint computes twice.

It restores torch's generator before the second time. While a program is written the generator
draws nothing, so it serves as a clock: each draw advances it. A draw in a known state of the
generator is a repetition of the first draw in that state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import written_to
from fleetlight.torch_compat.operators import schema
from fleetlight.torch_compat.tensors import has_saved_tensor_hooks, tree_leaves

_CLONE = torch.ops.aten.clone.default
#: arguments that disable random numbers
_SWITCHES = ("dropout_p", "train", "training")


class CheckpointRng:
    """The random draws in the checkpoints of a program."""

    def __init__(self) -> None:
        #: by the time of a draw: the next time, and the drawn values
        self._drawn: dict[bytes, tuple[int, list[Any]]] = {}
        self._times = itertools.count(2**40)
        self._before: Tensor | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the present forward may be computed again."""
        return has_saved_tensor_hooks()

    def drawn(
        self, write: Callable[..., Any], func: Any, args: Any, kwargs: Any, is_again: bool
    ) -> Any:
        """Write a draw; a repeated one uses the numbers of the first."""
        generator = torch.default_generator
        state = generator.get_state()
        time = state.numpy().tobytes()
        if is_again and time in self._drawn:
            next_time, before = self._drawn[time]
            generator.manual_seed(next_time)
            return _repeated(write, func, args, before)
        out = write(func, args, kwargs)
        if not is_again:
            self._before = state if self._before is None else self._before
            # the drawn tensor may be changed in place before the repetition
            kept = [_copy(write, value) for value in tree_leaves(out)]
            self._drawn[time] = next(self._times), kept
            generator.manual_seed(self._drawn[time][0])
        return out

    def end(self) -> None:
        """Restore the generator."""
        if self._before is not None:
            torch.default_generator.set_state(self._before)
        self._drawn, self._before = {}, None


def _copy(write: Callable[..., Any], value: Any) -> Any:
    return write(_CLONE, (value,), {}) if isinstance(value, Tensor) else value


def _repeated(write: Callable[..., Any], func: Any, args: Any, before: Sequence[Any]) -> Any:
    """Write the result of an earlier draw as the result of this one."""
    changed = list(written_to(func, args))
    if not changed:
        again = [_copy(write, value) for value in before]
        return again[0] if len(again) == 1 else tuple(again)
    if len(changed) > 1 or changed[0] is not args[0]:
        raise PlanError(
            f"{func.overloadpacket.__name__} draws random numbers inside "
            "torch.utils.checkpoint, and a program cannot repeat them; call it outside"
        )
    return write(torch.ops.aten.copy_.default, (changed[0], before[0]), {})


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    defaults = {a.name: a.default_value for a in schema(func).arguments}
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    # arguments of attention, dropout and similar kernels may disable it
    return all(given.get(switch, True) for switch in _SWITCHES)


def node_draws(node: fx.Node) -> bool:
    """Whether an operation of a graph draws random numbers."""
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)
