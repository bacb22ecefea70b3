# SPDX-License-Identifier: Apache-2.0
"""Code is generated once per purpose, matches the current form, and is freed with the form."""

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

pytestmark = pytest.mark.slow


class CopyForm:
    """A pass that replaces the form by an equal copy."""

    name = "rewritten"

    def __call__(self, form: Form) -> Form:
        return dataclasses.replace(form)


def program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_code_is_generated_once_per_purpose() -> None:
    coder, one = Coder(), program()
    purposes = [(("loss",), EVERYTHING), ((), EVERYTHING), (("loss",), ("forward",))]
    codes = [coder(one, *purpose) for purpose in purposes]
    assert len({id(code) for code in codes}) == 3
    assert all(coder(one, *purpose) is code for purpose, code in zip(purposes, codes, strict=True))


def test_a_rewritten_form_gets_new_code_and_frees_the_old() -> None:
    coder, one = Coder(), program()
    before = coder(one, ["loss"], EVERYTHING)
    form, code = weakref.ref(one.form), weakref.ref(before)
    del before
    one.passes = (CopyForm(),)
    coder(one, ["loss"], EVERYTHING)
    gc.collect()
    assert form() is None
    assert code() is None


def test_the_coder_keeps_no_program_alive() -> None:
    coder, one = Coder(), program()
    coder(one, ["loss"], EVERYTHING)
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", [True, None, "inducter", 1])
def test_other_back_ends_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile=.*: expected 'fx' or 'inductor'"):
        static.Executor(compile=value)


def test_pulled_rows_have_a_dynamic_size_and_other_state_has_not() -> None:
    form = program().form
    rows = Slot("pulled", "rows of table", torch.zeros(0, 8))
    shapes = shapes_of(dataclasses.replace(form, state=(*form.state, rows)))
    assert set(shapes[: len(form.state)]) == {None}
    assert shapes[len(form.state) :] == [(None, None), (None, 8), (None,)]
