# SPDX-License-Identifier: Apache-2.0
"""A large table saved into a bucket and restored from it, beside a plain upload of its bytes.

The bucket is moto's S3 server on this machine, which takes a core itself; so only ratios count.
Then saves of what changed are measured beside saves of all rows, in a folder.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.store.s3 import VARIABLES, FaultProxy, S3Server, running_server

from benchmarks import interleave, report
from fleetlight.kernels import servers_of
from fleetlight.ps.messages import Load, TableFile
from fleetlight.ps.placement import buckets_of
from fleetlight.ps.plan import InitializerPlan, Plan, RulePlan, TablePlan
from fleetlight.ps.server.checkpoints.checkpoint_handler import TableObjects
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.store import store_at

CLAIM = (
    "A table of 20 million rows (dimension 16) of 2 servers is saved into an S3 bucket in at most "
    "1.25 times the time of a plain upload of as many bytes (0.8 of its rate), checksums included. "
    "3 servers restore it and fetch at most 1.1 times its bytes. If 1 % of the rows have changed, "
    "a delta takes at most a tenth of the bytes and of the time of a save of all rows."
)
CHANGED = 0.01
DIM, ROW_BYTES = 16, 72
CLAIMED_RATE, CLAIMED_BYTES, CLAIMED_DELTA = 0.8, 1.1, 0.1
#: uploads at a time, and the size of each, as in a save
PARALLEL, UPLOAD = 4, 64 << 20
SERVERS, RESTORED = 2, 3


def state_of(server: int, servers: int) -> ServerState:
    """A server with an empty table."""
    table = TablePlan("t", DIM, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
    plan = Plan(
        mode="async",
        worker_num=1,
        server_num=servers,
        seed=0,
        tables=[table],
        dense=[],
        optimizers=[],
    )
    return ServerState(plan, server, [], [])


def filled(server: int, rows: int) -> ServerState:
    """One of the servers, with its part of the rows."""
    ids = np.arange(rows, dtype=np.int64) * 2_654_435_761
    mine = ids[servers_of(ids, SERVERS) == server]
    state = state_of(server, SERVERS)
    for start in range(0, len(mine), 1 << 20):
        some = mine[start : start + (1 << 20)]
        values = np.random.default_rng(start).standard_normal((len(some), DIM), np.float32)
        state.tables[0].fill(some, values)
    return state


def save(states: Sequence[ServerState], url: str) -> list[TableFile]:
    """As the servers do, at the same time."""

    def one(state: ServerState) -> list[TableFile]:
        return TableObjects(url, state).save(state.cut())

    with ThreadPoolExecutor(len(states)) as threads:
        return [file for files in threads.map(one, states) for file in files]


def upload(block: NDArray[np.uint8], nbytes: int, url: str) -> None:
    """As many bytes, by obstore alone."""
    import obstore
    from obstore.store import from_url

    store: Any = from_url(url, client_options={"allow_http": True, "timeout": "60s"})

    def one(number: int) -> None:
        size = min(UPLOAD, nbytes - number * UPLOAD)
        obstore.put(store, f"raw{number}", block[:size].data, chunk_size=8 << 20, max_concurrency=8)

    with ThreadPoolExecutor(SERVERS * PARALLEL) as threads:
        list(threads.map(one, range(-(-nbytes // UPLOAD))))


def timed(act: Callable[[], object]) -> interleave.Play:
    """A turn that does this once."""
    return interleave.stepping(act, 1, lambda: None)


def emptied(url: str) -> None:
    """Remove all objects: the server keeps them in memory and temporary files."""
    store = store_at(url)
    store.delete([entry.name for entry in store.list()])


def restored_bytes(server: S3Server, url: str, files: Sequence[TableFile], rows: int) -> int:
    """The bytes that other servers fetch, after comparing the number of their rows."""
    proxy = FaultProxy(server.port)
    found = 0
    try:
        for number in range(RESTORED):
            state = state_of(number, RESTORED)
            mine = buckets_of(number, RESTORED)
            here = [
                f
                for f in files
                if f.buckets and f.buckets[0] < mine.stop and mine.start < f.buckets[1]
            ]
            sums = {f.name: (f.bytes, f.sha256) for f in here}
            objects = TableObjects(url, state)
            objects._store = store_at(url, endpoint=proxy.endpoint)
            message = Load(url, [(f.table, f.name) for f in here], epoch=1, sums=sums)
            objects.check(message)
            objects.load(message)
            found += len(state.tables[0])
        assert found == rows, f"{found} rows came back of {rows}"
        return proxy.fetched()
    finally:
        proxy.close()


def bucket(options: argparse.Namespace) -> Iterator[str]:
    """A save beside a plain upload, then a restore."""
    states = [filled(server, options.rows) for server in range(SERVERS)]
    block = np.random.default_rng(1).integers(0, 256, UPLOAD, np.uint8)
    with running_server() as server:
        os.environ.update(VARIABLES, AWS_ENDPOINT_URL=server.endpoint)
        url = f"s3://{server.new_bucket()}/run"
        nbytes = sum(f.bytes for f in save(states, url))

        def fresh(act: Callable[[], object]) -> interleave.Share:
            emptied(url)
            return timed(act)()

        plays = {
            "plain upload": lambda: fresh(lambda: upload(block, nbytes, url)),
            "save": lambda: fresh(lambda: save(states, url)),
        }
        found = [interleave.interleave(plays, options.rounds, 1)]
        emptied(url)
        files = save(states, url)
        states.clear()
        fetched = restored_bytes(server, url, files, options.rows)
    raw, ours = interleave.series(found)
    ratio = report.Ratio(ours, raw, CLAIMED_RATE)
    shares, title = interleave.foreign(found), f"Saves of {nbytes / 2**20:,.0f} MiB"
    yield report.section(title, [raw, ours], [ratio], shares)
    yield (
        f"## Restore\n\n{RESTORED} servers fetched {fetched / nbytes:.3f} times the bytes that "
        f"{SERVERS} servers had saved in {len(files)} files; at most "
        f"{report.at_most(fetched / nbytes, CLAIMED_BYTES)}."
    )


def deltas(options: argparse.Namespace) -> Iterator[str]:
    """All rows and 1 % of them saved into a folder by turns."""
    state = filled(0, SERVERS * options.rows)
    table, rng = state.tables[0], np.random.default_rng(2)
    pieces = table.cut(ordered=False).pieces(table.lock)
    ids = np.concatenate([ids.copy() for ids, _ in pieces])
    sizes: dict[bool, int] = {}

    def play(delta: bool) -> interleave.Share:
        state.cut(base="base")
        state.drop_cuts()
        assert state.knows_since("base")
        changed = rng.choice(ids, int(CHANGED * len(ids)), replace=False)
        table.push(changed, np.ones((len(changed), DIM), np.float32), {"lr": 0.1}, 0)
        with tempfile.TemporaryDirectory() as folder:
            taken = timed(lambda: state.save(state.cut(delta=delta), Path(folder)))()
            sizes[delta] = sum(path.stat().st_size for path in Path(folder).iterdir())
        return taken

    plays = {"all rows": functools.partial(play, False), "delta": functools.partial(play, True)}
    interleave.interleave(plays, 1, 1)  # compiles kernels
    found = [interleave.interleave(plays, options.rounds, 1)]
    whole, part = interleave.series(found)
    ratio = report.Ratio(part, whole, 1 / CLAIMED_DELTA)
    title = f"{len(ids):,} rows, of which {CHANGED:.0%} changed"
    yield report.section(title, [whole, part], [ratio], interleave.foreign(found))
    share = sizes[True] / sizes[False]
    yield f"A delta has {share:.3f} of the bytes; {report.at_most(share, CLAIMED_DELTA)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result page."""
    parser = report.parser(__doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=20_000_000)
    options = parser.parse_args(argv)
    if options.quick:
        options.rows, options.rounds = 20_000, 1
    return report.page("storage", CLAIM, chain(bucket(options), deltas(options)), options.quick)


if __name__ == "__main__":
    sys.exit(main())
