# SPDX-License-Identifier: Apache-2.0
"""Hashes, buckets and servers of ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, same

from fleetlight.errors import ConfigError
from fleetlight.kernels import BUCKETS, buckets, servers_of, splitmix64, twin_table


def test_hashes_are_part_of_the_format() -> None:
    # the first outputs of the published splitmix64 generator for seeds 0, 1 and -1
    expected = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]
    assert splitmix64([0, 1, -1]).tolist() == expected


@settings(deadline=None)
@given(id_batches, st.integers(1, 40))
def test_hashes_buckets_and_servers_equal_the_twins(ids: NDArray[np.int64], servers: int) -> None:
    assert same(splitmix64(ids), twin_table.splitmix64(ids))
    assert same(buckets(ids), twin_table.buckets(ids))
    assert same(servers_of(ids, servers), twin_table.servers_of(ids, servers))


def test_servers_own_bucket_ranges_of_nearly_equal_size() -> None:
    ids = np.arange(100_000)
    owners = servers_of(ids, 3)[np.argsort(buckets(ids), kind="stable")]
    assert (np.diff(owners) >= 0).all()
    assert np.bincount(owners).tolist() == pytest.approx([33_333] * 3, rel=0.02)


@pytest.mark.parametrize("servers", [0, BUCKETS + 1])
def test_invalid_server_counts_are_refused(servers: int) -> None:
    with pytest.raises(ConfigError, match=f"{servers} servers, expected 1 to 16384"):
        servers_of([1], servers)
