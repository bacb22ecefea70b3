# SPDX-License-Identifier: Apache-2.0
"""Layers that keep rows on a GPU train as those that copy all rows."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from tests.fleet.served import test_cached_tables as jobs
from tests.gpu.needed import GPU, close
from tests.served import SYNC, Member, Net, run

from fleetlight.kernels import dedup
from fleetlight.ps.layers.caching.device_cache import DeviceCache
from fleetlight.ps.layers.staging import staging_of

pytestmark = GPU


def build(device: str, model: Any, **layer: Any) -> Any:
    made = model(**layer).to(device)
    return made, [torch.optim.Adagrad(made.parameters(), lr=0.1)]


def train(worker: Member, device: str) -> Any:
    """Training with two batches in each step, and an evaluation after it."""
    losses = []
    for t in range(jobs.STEPS):
        worker.optimizer.zero_grad()
        for n in range(2):
            ids = jobs.IDS[(t + n) % jobs.STEPS, worker.index]
            target = jobs.TARGETS[t, worker.index].to(device)
            jobs.loss_of(worker.model, ids, target).backward()  # type: ignore[no-untyped-call]
        worker.optimizer.step()
        with torch.no_grad():
            losses.append(float(jobs.loss_of(worker.model, ids, target)))
    worker.barrier()
    dense = [p.detach().cpu() for p in worker.model.parameters() if p.numel()]
    cached = worker.communicator.cached
    return losses, dense, torch.from_numpy(worker.rows(range(30))), cached and jobs.counts(worker)


@pytest.mark.parametrize("model", [Net, jobs.Bag, jobs.Many])
def test_sync_training_with_a_cache_equals_that_without(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch asks for it before it promises equal matrix products
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def trained(device: str, **layer: Any) -> Any:
        made = functools.partial(build, device, model, **layer)
        return run(made, functools.partial(train, device=device), SYNC, servers=2)

    torch.use_deterministic_algorithms(True)
    try:
        plain, cached, here = (
            trained("cuda"),
            trained("cuda", **jobs.CACHE),
            trained("cpu", **jobs.CACHE),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for found, expected, in_memory in zip(cached, plain, here, strict=True):
        torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=0)
        close(found[:3], in_memory[:3])
        # the same rows are found in both places
        assert found[3] == in_memory[3]
        assert found[3][0]


def test_a_layer_that_moves_takes_its_rows_along() -> None:
    def work(worker: Member) -> Any:
        ids = torch.arange(8)
        with torch.no_grad():
            here = worker.model(ids)
            there = worker.model.cuda()(ids)
        assert there.is_cuda
        close(there, here)
        return jobs.counts(worker)

    made = functools.partial(build, "cpu", lambda **layer: jobs.SparseEmbedding(4, **layer))
    assert run(functools.partial(made, **jobs.CACHE), work, SYNC, workers=1) == [(0, 16)]


def test_streams_of_several_threads_use_the_rows_in_turn() -> None:
    """A stream that is behind gathers rows before another one overwrites their slots."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache, streams = DeviceCache(256, 1000, lambda: device), [torch.cuda.Stream() for _ in "ab"]
    busy = torch.randn(4096, 4096, device=device)
    found = []
    for number in range(8):
        stream = streams[number % 2]
        with torch.cuda.stream(stream):
            if number % 2:
                for _ in range(5):
                    busy = torch.tanh(busy @ busy)
            lookup = cache.begin(dedup(np.arange(1000) + 1000 * (number // 2), 1), 0)
            arrived = np.full((int(lookup.missing.sum()), 256), number // 2, np.float32)
            found.append(cache.finish(lookup, arrived, 0, {}))
    torch.cuda.synchronize()
    for number, rows in enumerate(found):
        assert torch.equal(rows.cpu(), torch.full((1000, 256), float(number // 2)))
    assert (cache.found, cache.pulled) == (4000, 4000)


def test_the_current_stream_follows_the_last_one() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    staging, busy = staging_of(device), torch.randn(4096, 4096, device=device)
    last = staging.after(None)
    assert last == torch.cuda.current_stream(device)
    for _ in range(20):
        busy = torch.tanh(busy @ busy)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert staging.after(last) == torch.cuda.current_stream(device)
        copied = busy.clone()
    torch.cuda.synchronize()
    assert torch.equal(copied, busy)
