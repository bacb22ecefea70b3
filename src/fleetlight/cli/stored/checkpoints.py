# SPDX-License-Identifier: Apache-2.0
"""`fleetlight checkpoints`: list, verify, prune and copy checkpoints in folders and buckets."""

from __future__ import annotations

import argparse

from fleetlight.cli.terminal.output import print_table
from fleetlight.errors import CheckpointError, counted

_LOCATION = "a folder, or a URL such as s3://bucket/run"


def add_checkpoints(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `checkpoints` and its own commands."""
    parser = commands.add_parser("checkpoints", help="list, verify, prune or copy checkpoints")
    verbs = parser.add_subparsers(required=True, metavar="command")
    listing = verbs.add_parser("list", help="print the generations, the current one first")
    listing.set_defaults(command=_list)
    verifying = verbs.add_parser("verify", help="read all bytes and compare their checksums")
    verifying.add_argument("--all", action="store_true", help="earlier generations, too")
    verifying.set_defaults(command=_verify)
    pruning = verbs.add_parser("prune", help="remove earlier generations and remains of saves")
    pruning.add_argument(
        "--keep", type=int, default=1, metavar="N", help="how many generations stay (default: 1)"
    )
    pruning.set_defaults(command=_prune)
    copying = verbs.add_parser("copy", help="copy a checkpoint, verified, into a folder or bucket")
    copying.add_argument(
        "--generation", type=int, metavar="N", help="which one (default: the current one)"
    )
    copying.set_defaults(command=_copy)
    for verb in (listing, verifying, pruning, copying):
        verb.add_argument("location", metavar="FROM" if verb is copying else "AT", help=_LOCATION)
    copying.add_argument("to", metavar="TO", help=_LOCATION)


def _list(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint.storage.maintenance import generations
    from fleetlight.checkpoint.storage.manifest import BaseEntry

    rows = [("generation", "saved (UTC)", "step", "MiB", "files", "job")]
    for manifest in generations(found.location):
        size = sum(file.bytes for file in manifest.files) / 2**20
        job = counted(manifest.workers, "worker")
        if manifest.servers:
            count = sum(table.rows for table in manifest.tables)
            job += f", {counted(manifest.servers, 'server')}, {counted(count, 'row', ',')}"
        if isinstance(manifest.base, BaseEntry):
            job += f", changes since generation {manifest.base.generation}"
        saved = f"{manifest.created:%Y-%m-%d %H:%M}"
        step, files = str(manifest.step), str(len(manifest.files))
        rows.append((str(manifest.generation), saved, step, f"{size:,.1f}", files, job))
    print_table(rows)
    return 0


def _verify(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint.storage.maintenance import generations, verify
    from fleetlight.checkpoint.storage.manifest import all_files

    damaged = 0
    for manifest in generations(found.location)[: None if found.all else 1]:
        try:
            verify(found.location, manifest, lambda name: None)
        except CheckpointError as error:
            damaged += 1
            print(f"generation {manifest.generation}: {error}")
        else:
            files = counted(len(all_files(manifest)), "file")
            print(f"generation {manifest.generation}: {files} as they were written")
    return 1 if damaged else 0


def _prune(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint.storage.maintenance import prune

    print(f"removed {counted(prune(found.location, found.keep), 'folder')}")
    return 0


def _copy(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint.storage.maintenance import copy

    copied = copy(found.location, found.to, found.generation, print)
    print(f"copied step {copied.step} to {found.to}, as generation {copied.generation}")
    return 0
