# SPDX-License-Identifier: Apache-2.0
"""Dynamic sizes have readable names, equal in every process."""

import torch
from torch import Tensor

from fleetlight import static
from fleetlight.static.graph.form import Sizes


def written() -> tuple[static.Program, Tensor]:
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [None, None, 4])
        other = static.data("other", [None, 2])
        flat = x.reshape(-1, 4)
        output = flat.sum(0) + torch.cat([other, other]).sum()
    return program, output


def test_dynamic_sizes_are_named_batch_or_by_feed() -> None:
    program, _ = written()
    lines = str(program).splitlines()
    assert any(line.startswith("x ") and "float32[batch, x_1, 4]" in line for line in lines)
    assert any("float32[other_0, 2]" in line for line in lines)
    assert any("float32[batch*x_1, 4]" in line for line in lines)
    assert any("float32[2*other_0, 2]" in line for line in lines)


def test_size_names_do_not_depend_on_earlier_programs() -> None:
    assert str(written()[0]) == str(written()[0])


def test_all_kinds_of_values_are_described() -> None:
    sizes = Sizes(written()[0].form)
    tensor = torch.zeros(2, 3, dtype=torch.bool)
    assert sizes.value(tensor) == "bool[2, 3]"
    assert sizes.value((tensor, [torch.ones(())])) == "(bool[2, 3], (float32[]))"
    assert sizes.value(3) == "3"
    assert sizes.value(None) == ""
