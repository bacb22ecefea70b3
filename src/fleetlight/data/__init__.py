# SPDX-License-Identifier: Apache-2.0
"""Records for training: sharding over workers, readers of well-known data sets, made-up ones.

The public names are in `fleetlight.data.public`. The first use of one imports them all, so a job
that reads its records in another way does not wait for the readers.

`data` shards loaders and reads data sets. Its public names are in `public.py`, which loads at the
first use of one. Upper parts import lower ones:

- `loader.py` is the DataLoader that a worker reads. It brings a batch to the script:
  torch loads the batch, the source counts it, the cursor moves, and the observer is called.
  `cursor.py` is the position in the loader, which names the order that it holds in.
- `loading_processes.py` lets the processes of torch's DataLoader survive a SIGTERM until the job
  has saved.
- `read_ahead.py` loads the next values of any iterator before their turn.
- `observer.py` has the hooks of a job during an iteration.
- `queue/`: the records of a shard queue. A worker asks a `QueueClient` for one range after
  another.
- `sources/`: the records of other loaders, by number or from a stream. Each worker gets its part
  of every block. Where records are read in groups, `lane_source.py` gives each worker windows of
  its own, and `loaded_groups.py` loads groups before their turn. `split_stream.py` has streams
  whose shards are dealt out whole: workers agree on the batches of their next steps
  (`Job.agree_on_batches`).
- `order/` is pure: an epoch is one order of all records, cut into blocks of (workers x batch
  size). Each worker has a part of each block. So a position is one number, and any number of
  workers can resume from it. `window_order.py` is an order in which near records are near on
  disk, and `lanes.py` deals it out: full batches for all, from different windows.
- `columns/`: columnar files. `files/` has one format a file, which gives Arrow tables of groups.
  `groups.py` has the groups of all files, and decides by `conditions.py` which records are read;
  `layout.py` says which columns a batch has, `decoding.py` makes arrays of them.
- `tars/`: tar files of samples, as WebDataset writes them. `members.py` reads headers (pure),
  `shard.py` finds the samples of a tar once and cuts it into groups, `dataset.py` makes fields
  of members.
- `locations/`: files on this machine and in buckets, found by names, braces and patterns, and
  read in ranges.
- `words/`: texts as word ids, and pairs of words for word vectors.
- `readers/`: local files as data sets: `images/`, `tables/`, and `file_stream.py` for more than
  memory holds.
- `generated/`: random tables, their distributions, and the hidden model that labels them.
- `records.py`: data sets that make whole batches. `hashing.py`: ids of texts. `random_bits.py`:
  stateless random numbers.

`data` and `ps` never import each other, so a request for a range is a class in both:
`queue/client.py` `RangeRequest` here, a message there. `fleet/served/shard_queue.py` translates,
and leaves the wire format to `ps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.data.public import *  # noqa: F403


if not TYPE_CHECKING:  # mypy must see the names above only

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'fleetlight.data' has no attribute {name!r}")
        import fleetlight.data.public as public

        if name == "__all__":
            return public.__all__
        if name not in public.__all__:
            raise AttributeError(
                f"module 'fleetlight.data' has no attribute {name!r};"
                f" expected one of {', '.join(public.__all__)}"
            )
        value = globals()[name] = getattr(public, name)
        return value


def __dir__() -> list[str]:
    import fleetlight.data.public as public

    return sorted({*globals(), *public.__all__})
