# SPDX-License-Identifier: Apache-2.0
"""Every gradient is in one bucket, kinds are not mixed, limits hold, early gradients come first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.collective.buckets import MIB, BucketLimits, assign, flat_of, spread

gradients = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("ab")), max_size=60)
limits = st.builds(
    BucketLimits,
    bytes=st.integers(1, 8000),
    first_bytes=st.integers(1, 8000),
    count=st.integers(0, 7),
)


@given(gradients, limits)
def test_every_gradient_is_in_exactly_one_bucket(
    grads: list[tuple[int, str]], limits: BucketLimits
) -> None:
    buckets = assign([s for s, _ in grads], [k for _, k in grads], limits)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(grads)))
    assert all(bucket for bucket in buckets)


@given(gradients, limits)
def test_buckets_keep_kinds_limits_and_order(
    grads: list[tuple[int, str]], limits: BucketLimits
) -> None:
    sizes = [size for size, _ in grads]
    buckets = assign(sizes, [kind for _, kind in grads], limits)
    assert [b[-1] for b in buckets] == sorted(b[-1] for b in buckets)
    largest = max(limits.bytes, limits.first_bytes)
    for bucket in buckets:
        assert len({grads[i][1] for i in bucket}) == 1
        assert bucket == sorted(bucket)
        assert limits.count == 0 or len(bucket) <= limits.count
        # before its last gradient, a bucket was below its limit
        assert sum(sizes[i] for i in bucket[:-1]) < largest


def test_first_bucket_is_small() -> None:
    buckets = assign([MIB // 2] * 100, ["x"] * 100, BucketLimits())
    assert [len(b) for b in buckets] == [2, 50, 48]


def test_without_fusion_every_gradient_travels_alone() -> None:
    limits = BucketLimits.of(fuse=False, mib=25, count=0)
    assert assign([100] * 5, ["x"] * 5, limits) == [[0], [1], [2], [3], [4]]


def test_limits_follow_the_strategy() -> None:
    assert BucketLimits.of(fuse=True, mib=0.5, count=3) == BucketLimits(MIB // 2, MIB // 2, 3)
    assert BucketLimits.of(fuse=True, mib=16, count=0) == BucketLimits(16 * MIB, MIB, 0)


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 3).t(),
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_have_memory_order_and_are_written_back(layout: str) -> None:
    tensor, other = LAYOUTS[layout](), torch.randn(3)
    flat = flat_of([tensor, other], [tensor, other])
    memory = torch.as_strided(tensor, (tensor.numel(),), (1,))
    assert torch.equal(flat[:-3], memory)
    assert torch.equal(flat[-3:], other)
    expected = (tensor * 2, other * 2)
    spread(flat.mul(2), [tensor, other], [tensor, other])
    assert torch.equal(tensor, expected[0])
    assert torch.equal(other, expected[1])


def test_a_gradient_is_flattened_in_its_parameters_layout() -> None:
    parameter = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gradient = parameter.contiguous()
    flat = flat_of([gradient], [parameter])
    assert torch.equal(flat, torch.as_strided(parameter, (parameter.numel(),), (1,)))
    spread(flat.mul(2), [gradient], [parameter])
    assert torch.equal(gradient, parameter * 2)
