# SPDX-License-Identifier: Apache-2.0
"""Saves into a bucket behind a network that fails at random: a checkpoint is whole or absent.

    python -m tests.chaos.storing --runs 500

In each run a job saves, and requests fail in every way that `tests.store.s3` knows. In some runs
the job dies in the middle of the save, and in some another job saves at the same time. Then a
reader must find one checkpoint, all of its bytes as they were written: the newest that was saved,
or one of a save that failed without knowing whether its manifest had arrived.
"""

import argparse
import collections
import dataclasses
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Sequence

from tests.checkpoint.states import snapshot, whole_step
from tests.checkpoint.test_deltas import saved_tables
from tests.store import s3

from fleetlight import checkpoint
from fleetlight.checkpoint.storage import sources, stored_generations
from fleetlight.errors import CheckpointError
from fleetlight.store import store_at

FAULTS: Sequence[s3.Fault] = (
    s3.Status(500),
    s3.Status(503, "SlowDown"),
    s3.Status(429, ""),
    s3.Status(409, "ConditionalRequestConflict"),
    s3.Status(403, "AccessDenied"),
    s3.CutRequest(),
    s3.LostReply(),
    s3.LostReply(),
    s3.CutReply(),
    s3.HalfObject(),
    s3.Stalled(),
)
#: a run that takes longer hangs
LIMIT_S = 90.0


class Killed(BaseException):
    """The process of the save is gone: nothing is cleaned up."""


@dataclasses.dataclass
class Bucket:
    """One folder of a bucket, and the steps that a reader may find in it."""

    url: str
    proxy: s3.FaultProxy
    allowed: set[int]
    outcomes: collections.Counter[str]
    #: the other job has saved in this run
    other_saved: bool = False

    def run(self, seed: int) -> None:
        """One save with faults, then a read without."""
        rng, step = random.Random(seed), seed + 1
        self.proxy.rule = _rule(rng)
        kind = rng.choice(("alone", "alone", "killed", "two jobs"))
        try:
            self.other_saved = False
            self._save(rng, step, kind)
            assert not self.other_saved, f"run {seed}: the second of two jobs was not refused"
            self.allowed = {step}
            self.outcomes[f"{kind}: saved"] += 1
        except Killed:
            self.outcomes["killed in the middle"] += 1
        except CheckpointError as error:
            # the manifest may have arrived, although no reply said so
            self.allowed.add(step)
            refused = "another process" in str(error)
            self.outcomes[f"{kind}: {'refused' if refused else 'failed'}"] += 1
        finally:
            self.proxy.rule = lambda method, path: None
        if not checkpoint.exists(self.url):
            assert 0 in self.allowed, f"run {seed}: the checkpoint is gone"
            return
        found = whole_step(self.url)
        assert found in self.allowed, f"run {seed}: step {found}, expected one of {self.allowed}"
        self.allowed = {found}

    def _save(self, rng: random.Random, step: int, kind: str) -> None:
        honest, dies_after = stored_generations.StoredGeneration.create, rng.randrange(3)
        made = snapshot(step, size=1_100_000 if rng.random() < 0.03 else 4)
        if kind != "two jobs" and rng.random() < 0.5:
            base = checkpoint.Bases(self.url, 4).next()
            if base is not None and base.is_due:
                base = None
            self.outcomes["all rows" if base is None else "a delta"] += 1
            made = dataclasses.replace(
                made, save_tables=lambda target: saved_tables(target, step, base)
            )
        if kind == "two jobs":
            made = dataclasses.replace(made, save_tables=functools.partial(self._other, -step))
        if kind == "killed":

            def create(generation: stored_generations.StoredGeneration, name: str) -> object:
                if len(generation.files) == dies_after:
                    generation.published = True  # so that nothing is removed
                    raise Killed
                return honest(generation, name)

            stored_generations.StoredGeneration.create = create  # type: ignore[method-assign]
        try:
            checkpoint.write(self.url, made, keep=rng.choice((1, 2)))
        finally:
            stored_generations.StoredGeneration.create = honest  # type: ignore[method-assign]

    def _other(self, step: int, _: object) -> checkpoint.SavedTables:
        """Another job saves meanwhile; the one that began earlier must be refused then."""
        try:
            checkpoint.write(self.url, snapshot(step), keep=2)
            self.allowed, self.other_saved = {step}, True
        except CheckpointError:
            self.allowed.add(step)
        return checkpoint.SavedTables()


def _rule(rng: random.Random) -> object:
    share, lock = rng.choice((0.02, 0.1, 0.3)), threading.Lock()

    def rule(method: str, path: str) -> s3.Fault | None:
        with lock:
            return rng.choice(FAULTS) if rng.random() < share else None

    return rule


def _watched(bucket: Bucket, seed: int) -> str:
    """Run once; returns what went wrong."""
    wrong: list[str] = []

    def work() -> None:
        try:
            bucket.run(seed)
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return f"run {seed} hangs" if thread.is_alive() else "".join(wrong)


def storing(runs: int, seed: int, at_once: int) -> tuple[list[str], collections.Counter[str]]:
    """Run with several buckets in turn; returns what went wrong, and how the saves ended."""
    hurried = functools.partial(store_at, deadline_s=4.0, request_s=1.0)
    stored_generations.store_at = sources.store_at = hurried  # type: ignore[assignment]
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    with s3.running_server() as server:
        os.environ.update(s3.VARIABLES)
        proxy = s3.FaultProxy(server.port)
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        try:
            bucket = Bucket(f"s3://{server.new_bucket()}/run", proxy, {0}, outcomes)
            for number in range(seed, seed + runs):
                if number % at_once == 0:
                    bucket = Bucket(f"s3://{server.new_bucket()}/run", proxy, {0}, outcomes)
                if found := _watched(bucket, number):
                    wrong.append(found)
                    print(found, flush=True)
        finally:
            proxy.close()
    return wrong, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and say how the saves ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in_one_bucket", type=int, default=25)
    options = parser.parse_args(argv)
    began = time.monotonic()
    wrong, outcomes = storing(options.runs, options.seed, options.in_one_bucket)
    ends = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    print(
        f"{options.runs} saves with faults: {len(wrong)} wrong (torn, lost or hanging); {ends}; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
