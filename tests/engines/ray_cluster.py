# SPDX-License-Identifier: Apache-2.0
"""Keeps a Ray cluster until its standard input closes; prints the address of its job server."""

import sys

import ray
from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 6, "object_store_memory": 80 << 20, "include_dashboard": True},
    )
    ray.init(address=cluster.address)
    sys.stdout.write(f"READY {cluster.head_node.webui_url}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()
    cluster.shutdown()
