# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of nodes on this machine, each with an address of its own."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20
CPUS = 2
_numbers = itertools.count(2)


@contextlib.contextmanager
def nodes(count: int) -> Iterator[Cluster]:
    """This process is connected to the cluster, whose head runs no actor."""
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            add_node(cluster)
        ray.init(address=cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Cluster) -> Any:
    """Start a node at an address that no node had before."""
    address = f"127.0.0.{next(_numbers)}"
    return cluster.add_node(num_cpus=CPUS, node_ip_address=address, object_store_memory=STORE_BYTES)
