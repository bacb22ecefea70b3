# SPDX-License-Identifier: Apache-2.0
"""Sizes are computed from the feeds, not from activations that would be kept for it."""

import pytest
import torch
from tests.static import kinds
from torch import SymInt

from fleetlight import static


@pytest.mark.slow
def test_sizes_are_computed_from_feeds() -> None:
    program = kinds.captured(kinds.of(kinds.KINDS["attention, dropout"]))
    sizes = [n for n in program.form.graph.nodes if isinstance(n.meta.get("val"), SymInt)]
    feeds = {"x", "y"}
    assert sizes
    for node in sizes:
        given = {source.name for source in node.all_input_nodes}
        assert given <= feeds or all(source in sizes for source in node.all_input_nodes), node
    # and each size once
    assert len({n.meta["val"].node.expr for n in sizes}) == len(sizes)


def test_a_size_of_two_dimensions_is_their_product() -> None:
    class Flattens(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = (x * 2).flatten(0, 1)
            return flat.new_ones(flat.shape[0] + 1, 4)[1:] + flat

    program = static.capture(Flattens(), None, None, {"x": torch.ones(5, 3, 4)})
    executor = static.Executor()
    for size in (5, 2):
        (out,) = executor.run(program, {"x": torch.ones(size, 3, 4)}, ["output"])
        assert torch.equal(out, 3 * torch.ones(3 * size, 4))
