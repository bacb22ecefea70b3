# SPDX-License-Identifier: Apache-2.0
"""A large table saved into a bucket and restored from it, beside a plain upload of its bytes.

The bucket is moto's S3 server on this machine, which takes a core itself; so only ratios count.
With `--deltas`, saves of what changed are measured beside saves of all rows, in a folder.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.store.s3 import VARIABLES, FaultProxy, S3Server, running_server

from benchmarks import jobs, report
from benchmarks.machine import Meter, foreign_share
from fleetlight.kernels import servers_of
from fleetlight.ps.messages import Load, TableFile
from fleetlight.ps.placement import buckets_of
from fleetlight.ps.plan import InitializerPlan, Plan, RulePlan, TablePlan
from fleetlight.ps.server.checkpoints.table_objects import TableObjects
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.store import store_at

CLAIM = (
    "A table of 20 million rows (dimension 16) of 2 servers is saved into an S3 bucket in at most "
    "1.25 times the time of a plain upload of as many bytes (0.8 of its rate), checksums included. "
    "3 servers restore it and fetch at most 1.1 times its bytes."
)
DELTAS_CLAIM = (
    "If 1 % of the rows of a table (dimension 16) have changed, a delta takes at most a tenth of "
    "the bytes and of the time of a save of all rows."
)
CLAIMED_DELTA, CHANGED = 0.1, 0.01
DIM, ROW_BYTES = 16, 72
CLAIMED_RATE, CLAIMED_BYTES = 0.8, 1.1
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


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result page."""
    options = _parse(argv)
    if options.deltas:
        return measure_deltas(options)
    states = [filled(server, options.rows) for server in range(SERVERS)]
    block = np.random.default_rng(1).integers(0, 256, UPLOAD, np.uint8)
    times: dict[str, list[tuple[float, float]]] = {"plain upload": [], "save": []}
    foreign: list[float | None] = []
    with running_server() as server:
        os.environ.update(VARIABLES, AWS_ENDPOINT_URL=server.endpoint)
        url = f"s3://{server.new_bucket()}/run"
        nbytes = sum(f.bytes for f in save(states, url))
        for turn in range(options.rounds):
            names = list(times) if turn % 2 == 0 else list(reversed(times))
            with Meter() as meter:
                cpu = time.process_time()
                for name in names:
                    emptied(url)
                    act = (
                        (lambda: save(states, url))
                        if name == "save"
                        else (lambda: upload(block, nbytes, url))
                    )
                    times[name].append(timed(act))
            foreign.append(foreign_share(meter.wall_s, meter.busy_s, time.process_time() - cpu))
        emptied(url)
        files = save(states, url)
        states.clear()
        fetched = restored_bytes(server, url, files, options.rows)
    parts = [_rates(times, nbytes), _bytes(fetched, nbytes, len(files))]
    parts.append(report.foreign_line(foreign))
    print("\n\n".join(parts))
    if options.write:
        path = report.write("storage", CLAIM, parts)
        print(f"\nwritten: {path.relative_to(jobs.ROOT)}")
    return 0


def measure_deltas(options: argparse.Namespace) -> int:
    """Save all rows and 1 % of them into a folder by turns; print, and write the result page."""
    state = filled(0, SERVERS * options.rows)
    table, rng = state.tables[0], np.random.default_rng(2)
    pieces = table.cut(ordered=False).pieces(table.lock)
    ids = np.concatenate([ids.copy() for ids, _ in pieces])
    times: dict[str, list[tuple[float, float]]] = {"all rows": [], "delta": []}
    sizes: dict[str, int] = {}
    foreign: list[float | None] = []
    # the first round compiles kernels
    for turn in range(options.rounds + 1):
        state.cut(base="base")
        state.drop_cuts()
        assert state.knows_since("base")
        changed = rng.choice(ids, int(CHANGED * len(ids)), replace=False)
        rows = np.ones((len(changed), DIM), np.float32)
        with Meter() as meter:
            cpu = time.process_time()
            table.push(changed, rows, {"lr": 0.1}, 0)
            for name in ("all rows", "delta") if turn % 2 else ("delta", "all rows"):
                with tempfile.TemporaryDirectory() as folder:
                    act = functools.partial(_save_into, state, Path(folder), name == "delta")
                    times[name].append(timed(act))
                    sizes[name] = sum(path.stat().st_size for path in Path(folder).iterdir())
        foreign.append(foreign_share(meter.wall_s, meter.busy_s, time.process_time() - cpu))
    times = {name: each[1:] for name, each in times.items()}
    parts = [_deltas(times, sizes, len(ids)), report.foreign_line(foreign[1:])]
    print("\n\n".join(parts))
    if options.write:
        path = report.write("delta_saves", DELTAS_CLAIM, parts)
        print(f"\nwritten: {path.relative_to(jobs.ROOT)}")
    return 0


def _save_into(state: ServerState, folder: Path, delta: bool) -> None:
    state.save(state.cut(delta=delta), folder)


def _deltas(times: dict[str, list[tuple[float, float]]], sizes: dict[str, int], rows: int) -> str:
    whole, part = times["all rows"], times["delta"]
    table = report.table(
        ["", "MiB", "seconds of each round", "CPU s of this process"],
        [
            [
                name,
                f"{sizes[name] / 2**20:.1f}",
                " ".join(f"{s:.2f}" for s, _ in times[name]),
                f"{float(np.median([c for _, c in times[name]])):.2f}",
            ]
            for name in sizes
        ],
    )
    seconds = sorted(mine / all_rows for (mine, _), (all_rows, _) in zip(part, whole, strict=True))
    share, median = sizes["delta"] / sizes["all rows"], float(np.median(seconds))
    held = "held" if max(share, median) <= CLAIMED_DELTA else "missed"
    return (
        f"## Deltas\n\n{rows:,} rows, of which {CHANGED:.0%} changed\n\n{table}\n\nA delta has "
        f"{share:.3f} of the bytes and takes {median:.3f} of the time of all rows "
        f"({seconds[0]:.3f} to {seconds[-1]:.3f}); claimed {CLAIMED_DELTA}: {held}."
    )


def _rates(times: dict[str, list[tuple[float, float]]], nbytes: int) -> str:
    mib = nbytes / 2**20
    rows = [
        [
            name,
            f"{mib / float(np.median([s for s, _ in measured])):.0f}",
            " ".join(f"{s:.1f}" for s, _ in measured),
            f"{float(np.median([c for _, c in measured])):.1f}",
        ]
        for name, measured in times.items()
    ]
    pairs = zip(times["plain upload"], times["save"], strict=True)
    ratios = sorted(raw / ours for (raw, _), (ours, _) in pairs)
    median = float(np.median(ratios))
    held = "held" if median >= CLAIMED_RATE else "missed"
    table = report.table(["", "MiB/s", "seconds of each round", "CPU s of this process"], rows)
    return (
        f"## Save\n\n{mib:,.0f} MiB\n\n{table}\n\nA save has {median:.2f} of the rate of the plain "
        f"upload ({ratios[0]:.2f} to {ratios[-1]:.2f}); claimed {CLAIMED_RATE}: {held}."
    )


def _bytes(fetched: int, nbytes: int, files: int) -> str:
    ratio = fetched / nbytes
    held = "held" if ratio <= CLAIMED_BYTES else "missed"
    return (
        f"## Restore\n\n{RESTORED} servers fetched {fetched / 2**20:,.0f} MiB of the "
        f"{nbytes / 2**20:,.0f} MiB that {SERVERS} servers had saved in {files} files: {ratio:.3f} "
        f"of the bytes; claimed at most {CLAIMED_BYTES}: {held}."
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deltas", action="store_true", help="what changed beside all rows")
    parser.add_argument("--no-write", dest="write", action="store_false")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
