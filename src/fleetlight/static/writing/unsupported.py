# SPDX-License-Identifier: Apache-2.0
"""Errors for operations that a program cannot have, with alternatives."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import written_to
from fleetlight.static.graph.variable import Variable
from fleetlight.torch_compat.fakes import ASKS_FOR_VALUES, TRACES, UnsupportedOperatorException
from fleetlight.torch_compat.operators import ITEM

#: functions of Python and NumPy that read the values of a tensor
_ASKS_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "__array__"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__"),
    )
)
#: torch's name of a dynamic size, or a multiple of one
_OPEN = re.compile(r"\b(?:\d+\*)?s\d+\b")
_COPIES = ("__deepcopy__", "__reduce_ex__")


def function(func: Any) -> None:
    """Refuse a torch function that needs values."""
    name = getattr(func, "__name__", "")
    if name in _ASKS_VALUES:
        raise _needs_values(name)
    if func in (Tensor.backward, torch.autograd.backward):
        raise PlanError(
            "backward() of a variable computes nothing, since a program has no values while it is "
            "written; minimize(optimizer, loss) writes backward and the step into it"
        )
    if name in _COPIES:
        raise PlanError(
            "a variable cannot be copied or pickled, since it has no value; save "
            "the program, or copy the model before you call it"
        )


def changes(func: Any, args: Sequence[Any], entries: Mapping[int, Any]) -> None:
    """Refuse to change a constant: changes of all runs would accumulate."""
    if func is ITEM:
        raise _needs_values("item")
    for value in written_to(func, args):
        entry = entries.get(id(value))
        if isinstance(value, Variable) or (entry and entry.slot.kind != "constant"):
            continue
        raise PlanError(
            f"{func.overloadpacket.__name__}: a tensor of shape {list(value.shape)}, neither "
            "parameter nor buffer, changes in place, so each run would continue with the changes "
            "of the previous one; create it from a tensor of the program, x.new_zeros(...), or "
            "register it as a buffer"
        )


@contextlib.contextmanager
def of(func: Any) -> Iterator[None]:
    """Inside the block, `func` is recorded; explain failures in plain words."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    was_silent, TRACES.disabled = TRACES.disabled, True
    try:
        yield
    except ASKS_FOR_VALUES as error:
        raise _needs_values(name) from error
    except UnsupportedOperatorException as error:
        raise PlanError(
            f"a program cannot have {name}, since it has dense tensors only ({error}); call it "
            "outside, or train eagerly"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "not tracked with proxy" in str(error):
            raise PlanError(
                f"{name} computes with a dynamic size, which torch {torch.__version__} cannot "
                "write into a program; torch 2.13 can, or train eagerly"
            ) from error
        # torch's own errors, such as for shapes that do not match
        error.args = tuple(_OPEN.sub("any", a) if isinstance(a, str) else a for a in error.args)
        raise
    finally:
        TRACES.disabled = was_silent


def _needs_values(name: str) -> PlanError:
    return PlanError(
        f"the program reads the values of its tensors ({name.strip('_')}: an `if`, a loop, "
        ".item() or print), which do not exist while it is written: it is the same for all "
        "batches; use torch.where instead of an `if`, fetch what you want to print, or train "
        "eagerly"
    )
