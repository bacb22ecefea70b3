# SPDX-License-Identifier: Apache-2.0
"""`fleetlight table stats LOGDIR`: what the tables of a running job have, by its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from fleetlight.cli.terminal.output import print_fitted
from fleetlight.errors import ConfigError, counted, did_you_mean
from fleetlight.observe.telemetry.history import History, Series
from fleetlight.observe.telemetry.job_metrics import FRESH_S
from fleetlight.observe.telemetry.snapshot import FOLDER, labelled, split_key

#: seconds over which growth is measured
_SPAN_S = 60.0


def is_log_folder(location: str) -> bool:
    """True for the log folder of a job that records metrics."""
    return "://" not in location and (Path(location) / FOLDER).is_dir()


def print_running(location: str, wanted: str | None) -> None:
    """Print the rows and bytes of each table, by server."""
    history = History(Path(location))
    history.poll()
    # one process with a server inside counts as a worker
    servers = {
        name: one
        for name, one in sorted(history.series.items())
        if any(split_key(key)[0] == "table_rows" for key in one.columns)
    }
    names = sorted(
        {
            label
            for one in servers.values()
            for key in one.columns
            if (label := split_key(key)[1]) and split_key(key)[0] == "table_rows"
        }
    )
    if wanted is not None and wanted not in names:
        known = did_you_mean(wanted, names) if names else "no table has metrics there"
        raise ConfigError(f"{location} has no table {wanted!r}; {known}")
    if not names:
        print_fitted(f"{location}: no tables yet")
    for name in names:
        if wanted in (None, name):
            _print(name, servers)


def _print(name: str, servers: Mapping[str, Series]) -> None:
    found = {
        server: (
            one.last(labelled("table_rows", name)) or 0.0,
            one.last(labelled("table_bytes", name)) or 0.0,
        )
        for server, one in servers.items()
    }
    rows = sum(count for count, _ in found.values())
    size = sum(size for _, size in found.values())
    growth = sum(one.rate(labelled("table_rows", name), _SPAN_S) or 0.0 for one in servers.values())
    print_fitted(
        f"table {name}: {counted(int(rows), 'row', ',')}, {size / 2**20:,.1f} MiB in memory, "
        f"{60 * growth:+,.0f} rows/min"
    )
    for server, (count, size) in found.items():
        share = f", {count * len(found) / rows:.3f} of the average" if rows else ""
        age = time.time() - servers[server].times[-1]
        old = f", {age:.0f} s ago" if age > FRESH_S else ""
        print_fitted(
            f"  {server.replace('.', ' ')}: {counted(int(count), 'row', ',')}, "
            f"{size / 2**20:,.1f} MiB{share}{old}"
        )
