# SPDX-License-Identifier: Apache-2.0
"""Random generators continue where they were saved."""

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from fleetlight.checkpoint.state.rng import RngState, RngStateCache, rng_state, set_rng_state


def _no_cuda() -> bool:
    return torch.cuda.device_count() == 0


def draw() -> list[object]:
    # gauss and randn keep a spare number between calls, which is part of the state
    numpy = [float(np.random.randn()), int(np.random.randint(10**6))]
    return [random.random(), random.gauss(0, 1), *numpy, *torch.randn(3).tolist()]


def same(one: RngState, other: RngState) -> bool:
    return msgspec.json.encode(one) == msgspec.json.encode(other)


@pytest.mark.parametrize("before", range(3))
def test_generators_continue_after_a_round_trip(before: int) -> None:
    for _ in range(before):
        draw()
    state = msgspec.json.decode(msgspec.json.encode(rng_state()), type=RngState)
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "draw_or_seed",
    [
        lambda: None,
        lambda: np.random.randint(10),
        # every second number was drawn with the one before, and changes only the spare
        np.random.randn,
        lambda: np.random.seed(5),
        lambda: np.random.set_state(np.random.RandomState(6).get_state()),
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(5),
        lambda: torch.randn(1),
    ],
)
def test_the_cache_notices_every_draw(draw_or_seed: Callable[[], object]) -> None:
    cache = RngStateCache()
    for _ in range(3):
        assert same(cache.state(), rng_state())
        draw_or_seed()
    assert same(cache.state(), rng_state())


def test_the_cache_supports_other_generators_of_numpy() -> None:
    usual, cache = np.random.get_bit_generator(), RngStateCache()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        for _ in range(2):
            np.random.random()
            assert same(cache.state(), rng_state())
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.skipif(not _no_cuda(), reason="needs a machine without GPUs")
def test_states_of_missing_devices_are_ignored() -> None:
    set_rng_state(msgspec.structs.replace(rng_state(), cuda=[bytes(16)]))


@pytest.mark.gpu
@pytest.mark.skipif(_no_cuda(), reason="needs a GPU")
def test_cuda_generators_continue_after_a_round_trip() -> None:
    torch.randn(1, device="cuda")
    state = rng_state()
    expected = torch.randn(3, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.randn(3, device="cuda"), expected)
