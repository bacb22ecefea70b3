# SPDX-License-Identifier: Apache-2.0
"""Code is made once for each purpose, is that of the form as it is, and goes when the form goes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.static.nets import captured, net

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.coding.coder import Coder, shapes_of
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import Slot
from fleetlight.static.running.runners import EVERYTHING


class Rewritten:
    """A pass that changes nothing but the form."""

    name = "rewritten"

    def __call__(self, form: Form) -> Form:
        return dataclasses.replace(form)


def program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_it_is_made_once_for_each_purpose() -> None:
    coder, one = Coder(), program()
    purposes = [(("loss",), EVERYTHING), ((), EVERYTHING), (("loss",), ("forward",))]
    codes = [coder(one, *purpose) for purpose in purposes]
    assert len({id(code) for code in codes}) == 3
    assert all(coder(one, *purpose) is code for purpose, code in zip(purposes, codes, strict=True))


def test_a_form_that_was_rewritten_has_code_of_its_own_and_the_old_one_goes() -> None:
    coder, one = Coder(), program()
    before = coder(one, ["loss"], EVERYTHING)
    form, code = weakref.ref(one.form), weakref.ref(before)
    del before
    one.passes = (Rewritten(),)
    coder(one, ["loss"], EVERYTHING)
    gc.collect()
    assert form() is None
    assert code() is None


def test_it_does_not_keep_programs() -> None:
    coder, one = Coder(), program()
    coder(one, ["loss"], EVERYTHING)
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("value", [True, None, "inducter", 1])
def test_other_back_ends_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile=.*: expected 'fx' or 'inductor'"):
        static.Executor(compile=value)


def test_what_is_pulled_is_open_to_a_compiler_and_other_state_is_not() -> None:
    form = program().form
    rows = Slot("pulled", "rows of table", torch.zeros(0, 8))
    shapes = shapes_of(dataclasses.replace(form, state=(*form.state, rows)))
    assert set(shapes[: len(form.state)]) == {None}
    assert shapes[len(form.state) :] == [(None, None), (None, 8), (None,)]
