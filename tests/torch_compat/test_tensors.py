# SPDX-License-Identifier: Apache-2.0
"""Tensors that torch refuses to write as a whole are written through their distinct elements."""

import pytest
import torch
from torch import Tensor

from fleetlight.torch_compat.tensors import assign, distinct_elements

pytestmark = pytest.mark.contract

VIEWS = {
    "whole": torch.zeros(3, 4),
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0),
    "expanded": torch.zeros(4).expand(3, 4),
    "expanded scalar": torch.zeros(()).expand(2, 2),
    "permuted": torch.zeros(3, 4).t(),
    "both": torch.zeros(4).expand(3, 4).t(),
    "overlapping": torch.zeros(6).unfold(0, 3, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_assign_sets_every_element(view: Tensor) -> None:
    values = torch.full(view.shape, 7.0)
    assign(view, values)
    assert torch.equal(view, values)
    distinct_elements(view).add_(0.0)  # torch accepts this write


def test_each_distinct_element_appears_once() -> None:
    assert distinct_elements(torch.zeros(4).expand(3, 4)).shape == (1, 4)
    whole = torch.zeros(3, 4)
    assert distinct_elements(whole) is whole
