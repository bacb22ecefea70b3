# SPDX-License-Identifier: Apache-2.0
"""The pass marks all-reduces as hierarchical and changes nothing else."""

import pytest
import torch
from tests.static.doubling import rewritten, run
from tests.static.nets import batch, net
from tests.static.passes.test_insert_all_reduce import program_of

from fleetlight.collective.buckets import BucketLimits
from fleetlight.static.graph.fingerprint import fingerprint
from fleetlight.static.graph.form import Pass
from fleetlight.static.passes import FuseAllReduce, Hierarchical, InsertAllReduce, Narrow, Overlap
from fleetlight.static.rewriting.all_reduces import all_reduces_of

pytestmark = pytest.mark.slow

INSERT, FUSE = InsertAllReduce(), FuseAllReduce(BucketLimits(bytes=1000, first_bytes=300))
LEVELS = ([[0, 1], [2, 3]], [[0, 2]])
BY_HOSTS = Hierarchical(0, LEVELS)
ORDERS: list[tuple[Pass, ...]] = [
    (INSERT, BY_HOSTS),
    (INSERT, FUSE, BY_HOSTS, Overlap()),
    (INSERT, BY_HOSTS, FUSE, Narrow(), Overlap()),
    (INSERT, FUSE, Overlap(), BY_HOSTS),
]


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: "-".join(p.name for p in passes))
def test_every_bucket_begins_as_hierarchical(passes: tuple[Pass, ...]) -> None:
    program = program_of(net()).apply(*passes)
    doubling, _ = run(program, batch(0))
    assert doubling.inner == [0] * len(all_reduces_of(program.form.graph))
    assert doubling.inner


def test_the_report_names_groups_and_leaders() -> None:
    form = rewritten(program_of(net()).form, INSERT, FUSE, Hierarchical(2, LEVELS))
    report = "2 all-reduces are hierarchical: 2 groups of 2, then 2 leaders"
    assert form.reports[-1] == report
    narrow = rewritten(form, Hierarchical(2, LEVELS, torch.bfloat16))
    assert narrow.reports[-1] == f"{report} in bfloat16"


def test_levels_are_part_of_the_fingerprint() -> None:
    form = program_of(net()).form
    fingerprints = {
        fingerprint(rewritten(form, INSERT, *more))
        for more in ((), (BY_HOSTS,), (Hierarchical(2, LEVELS),))
    }
    assert len(fingerprints) == 3
