# SPDX-License-Identifier: Apache-2.0
"""What cannot be written into a program, and what to do instead."""

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

#: functions of Python and NumPy that ask a tensor for its values
_ASKS_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "__array__"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__"),
    )
)
#: an open size as torch calls it, or a multiple of one
_OPEN = re.compile(r"\b(?:\d+\*)?s\d+\b")
_COPIES = ("__deepcopy__", "__reduce_ex__")


def function(func: Any) -> None:
    """Refuse a function of torch that has no meaning while a program is written."""
    name = getattr(func, "__name__", "")
    if name in _ASKS_VALUES:
        raise _asked(name)
    if func in (Tensor.backward, torch.autograd.backward):
        raise PlanError(
            "backward() of a variable computes nothing, since a program has no values while it is "
            "written; minimize(optimizer, loss) writes backward and the step into it"
        )
    if name in _COPIES:
        raise PlanError(
            "a variable cannot be copied or pickled: it stands for a value of its program; save "
            "the program, or copy what the model was before"
        )


def changes(func: Any, args: Sequence[Any], entries: Mapping[int, Any]) -> None:
    """Refuse to change a constant: each run would change it again, and not anew."""
    if func is ITEM:
        raise _asked("item")
    for value in written_to(func, args):
        entry = entries.get(id(value))
        if isinstance(value, Variable) or (entry and entry.slot.kind != "constant"):
            continue
        raise PlanError(
            f"{func.overloadpacket.__name__}: a tensor of shape {list(value.shape)} that is no "
            "parameter and no buffer is changed where it is, so each run would go on with what the "
            "one before has left; make it of a tensor of the program, x.new_zeros(...), or "
            "register it as a buffer"
        )


@contextlib.contextmanager
def of(func: Any) -> Iterator[None]:
    """Inside the block, `func` is written down; say in plain words why it is not."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    was_silent, TRACES.disabled = TRACES.disabled, True
    try:
        yield
    except ASKS_FOR_VALUES as error:
        raise _asked(name) from error
    except UnsupportedOperatorException as error:
        raise PlanError(
            f"{name} has no form in a program, which has dense tensors only ({error}); do it "
            "outside, or train eagerly"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "not tracked with proxy" in str(error):
            raise PlanError(
                f"{name} computes with an open size in a way that torch {torch.__version__} cannot "
                "write into a program; torch 2.13 can, or train eagerly"
            ) from error
        # torch's own, such as of shapes that do not fit
        error.args = tuple(_OPEN.sub("any", a) if isinstance(a, str) else a for a in error.args)
        raise
    finally:
        TRACES.disabled = was_silent


def _asked(name: str) -> PlanError:
    return PlanError(
        f"the program looks at the values of its tensors ({name.strip('_')}: an `if`, a loop, "
        ".item() or print), which it does not have while it is written: it has one course for all "
        "batches; use torch.where in place of an `if`, fetch what you want to print, or train "
        "eagerly"
    )
