# SPDX-License-Identifier: Apache-2.0
"""`fleet.publish`: lets other programs look up the newest rows while training continues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fleetlight.errors import names_arguments
from fleetlight.fleet.job import current
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.fleet.protocols import RowPublisher
from fleetlight.store import absolute


@names_arguments
def publish(
    url: str | os.PathLike[str],
    every_s: float = 60.0,
    *,
    rows: str | Mapping[str, str] = "f32",
    tables: Sequence[str] | None = None,
    compact_at: float = 0.5,
    grace_s: float = 300.0,
) -> RowPublisher | None:
    """Publish tables and dense values to a folder or bucket, every `every_s` seconds.

    Every worker calls it after `fleet.init_worker()`. The first publication has all rows; the next
    ones have the rows that changed. Training continues meanwhile, and `fleet.stop_worker()`
    publishes once more. A `fleetlight.serve.Reader(url)` reads what is published. Publish each job
    to a target of its own.

    Args:
        url: the folder or URL.
        every_s: seconds between two publications.
        rows: the form of rows in files, of all or by table: `"f32"`, `"f16"`, or `"int8"` with a
            scale for each row.
        tables: the names of the tables; None for all.
        compact_at: all rows are published again when the deltas have this share of the bytes of
            the base.
        grace_s: seconds that files stay which no publication needs.

    Returns:
        The publisher on worker 0, whose `publish_now()` publishes at once; None on other workers.

    Raises:
        PlanError: the job has no parameter servers, or its tables are not open.
        PublicationError: another job publishes there.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, table="emb"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.init_worker()
        >>> publisher = fleet.publish("published", every_s=3600)
        >>> publisher.publish_now().number
        1
    """
    job = current()
    job.refuse_in_server("publish")
    return job.publish(PublishOptions(absolute(url), every_s, rows, tables, compact_at, grace_s))
