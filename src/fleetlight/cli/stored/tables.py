# SPDX-License-Identifier: Apache-2.0
"""`fleetlight table stats`: what the tables of a checkpoint, or of a running job, have."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleetlight.cli.stored.running_tables import is_log_folder, print_running
from fleetlight.cli.terminal.output import print_fitted, print_table
from fleetlight.errors import ConfigError, counted, did_you_mean

if TYPE_CHECKING:
    from fleetlight.checkpoint.storage.table_stats import TableStats


def add_table(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `table` and its own command."""
    parser = commands.add_parser("table", help="show what the tables of a checkpoint or a job have")
    verbs = parser.add_subparsers(required=True, metavar="command")
    stats = verbs.add_parser(
        "stats",
        help="rows, bytes, balance of the servers, and quantiles of counts",
        description="Of a checkpoint, reads headers, the index of buckets and counts, but no rows. "
        "Of a job, reads the metrics in its log folder.",
    )
    stats.add_argument(
        "location",
        metavar="AT",
        help="a checkpoint: a folder, or a URL such as s3://bucket/run; or the log folder of a job",
    )
    stats.add_argument("table", nargs="?", help="the name of one table (default: all)")
    stats.add_argument(
        "--generation", type=int, metavar="N", help="which one (default: the current one)"
    )
    stats.set_defaults(command=_stats)


def _stats(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint.storage.maintenance import chosen
    from fleetlight.checkpoint.storage.table_stats import table_stats

    if is_log_folder(found.location):
        print_running(found.location, found.table)
        return 0
    manifest = chosen(found.location, found.generation)
    names = [table.name for table in manifest.tables]
    if found.table is not None and found.table not in names:
        known = did_you_mean(found.table, names) if names else "it has no tables"
        raise ConfigError(f"{found.location} has no table {found.table!r}; {known}")
    if not names:
        print_fitted(f"step {manifest.step}: no tables")
    for table in manifest.tables:
        if found.table in (None, table.name):
            _print(table_stats(found.location, manifest, table))
    return 0


def _print(stats: TableStats) -> None:
    from fleetlight.checkpoint.storage.table_stats import PERCENTS

    for line in _lines(stats):
        print_fitted(line)
    if stats.quantiles:
        of = "all rows" if stats.sampled == stats.rows else f"{stats.sampled:,} rows, by chance"
        heads = [f"counts of {of}", *(f"{percent} %" for percent in PERCENTS)]
        counts = [
            [name, *(f"{value:,.4g}" for value in values)]
            for name, values in stats.quantiles.items()
        ]
        print_table([heads, *counts])
    if stats.admitted is not None:
        print_fitted(f"  admitted: {100 * stats.admitted:.1f} % of the rows")


def _lines(stats: TableStats) -> Iterator[str]:
    entry = stats.entry
    options = ", ".join(f"{name} {value:g}" for name, value in entry.options.items())
    rule = f"{entry.rule} ({options})" if options else entry.rule
    yield (
        f"table {entry.name}: {counted(stats.rows, 'row', ',')} of dim {entry.dim}, {rule}, "
        f"{stats.bytes / 2**20:,.1f} MiB"
    )
    if stats.changed is not None:
        rows, removed, size = stats.changed
        yield (
            f"  changed since this base: {counted(rows, 'row', ',')}, {size / 2**20:,.1f} MiB; "
            f"{removed:,} removed"
        )
    average = stats.rows / max(1, len(stats.servers))
    for part in stats.servers:
        share = f", {part.rows / average:.3f} of the average" if average else ""
        yield (
            f"  server {part.server}: {counted(part.rows, 'row', ',')}, "
            f"{part.bytes / 2**20:,.1f} MiB{share}"
        )
    if stats.buckets is not None and stats.rows:
        yield (
            f"  {len(stats.buckets):,} buckets: {stats.buckets.min():,} to "
            f"{stats.buckets.max():,} rows, {stats.buckets.mean():,.2f} on average"
        )
