# SPDX-License-Identifier: Apache-2.0
"""Layers on a GPU equal those in main memory: results, gradients and devices."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from tests.fleet.served import test_cached_tables as jobs
from tests.gpu.needed import GPU, close, on_both
from tests.ps.layers.collection import tables
from tests.ps.layers.collection.test_embedding_collection import FEATURES, batch
from tests.ps.rows import dense, opened
from tests.served import SYNC, Member, Net, run

from fleetlight.kernels import dedup
from fleetlight.ps.layers.caching.device_cache import DeviceCache
from fleetlight.ps.layers.collection.embedding_collection import EmbeddingCollection
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.staging import CudaStaging, Staging, staging_of

pytestmark = GPU
IDS = torch.tensor([[3, 1, 3], [0, 9, 1]])


def test_rows_are_on_the_device_of_the_layer_wherever_the_ids_are() -> None:
    def train(device: str) -> Any:
        layer: Any = opened(SparseEmbedding(3, padding_idx=9))[0].to(device)
        found = [layer(IDS), layer(IDS.to(device))]
        assert all(out.device.type == device for out in found)
        torch.stack([(out * out).sum() for out in found]).sum().backward()
        assert layer.weight.grad.device.type == device
        return [out.detach() for out in found], dense(layer.weight)

    here, there = on_both(train)
    close(there, here)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags(mode: str) -> None:
    def train(device: str) -> Any:
        combiner: Any = "sum" if mode == "weighted" else mode
        layer: Any = opened(SparseEmbeddingBag(3, combiner, padding_idx=9))[0].to(device)
        weights = torch.linspace(0.5, 2, 6, device=device).view(2, 3).requires_grad_()
        out = layer(IDS, per_sample_weights=weights if mode == "weighted" else None)
        assert out.device.type == device
        (out * out).sum().backward()
        return out.detach(), dense(layer.weight), *([weights.grad] if mode == "weighted" else [])

    here, there = on_both(train)
    close(there, here)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    layer, kept = opened(SparseEmbedding(3))
    layer.to("cuda", dtype)
    out = layer(torch.full((3000,), 1))
    assert out.dtype == dtype
    close(out[0], torch.from_numpy(kept.rows[1]).to(dtype))
    out.backward(torch.ones_like(out))
    assert dense(layer.weight)[1].tolist() == [3000.0] * 3


def test_sums_are_equal_each_time_if_the_script_asks_for_it() -> None:
    ids = torch.randint(0, 10, (20_000,))
    gradient = torch.randn(20_000, 3, device="cuda")

    def train() -> Any:
        layer, _ = opened(SparseEmbedding(3))
        layer.cuda()(ids).backward(gradient)
        return dense(layer.weight)

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [train() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_collections(samples: int) -> None:
    ids = batch(3, samples)

    def train(device: str) -> Any:
        collection = EmbeddingCollection(FEATURES).to(device)
        tables.opened(collection)
        weights = torch.linspace(0.5, 2, len(ids["user"][0]), device=device).requires_grad_()
        found: Any = collection(ids, {"user": weights})
        assert {out.device.type for out in found.values()} == {device}
        torch.stack([(out * out).sum() for out in found.values()]).sum().backward()
        gradients = [tables.dense(collection[name].weight) for name in FEATURES]
        return [out.detach() for out in found.values()], gradients, weights.grad

    here, there = on_both(train)
    close(there, here)


def copies() -> Staging:
    """The copies of the current GPU."""
    found = staging_of(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(found, CudaStaging)
    return found


def test_copies_in_both_directions_while_the_gpu_computes() -> None:
    busy, arrivals = torch.randn(2048, 2048, device="cuda"), []
    for number in range(20):
        busy = torch.tanh(busy @ busy)
        array = np.full((1000, 16), number, np.float32)
        there = copies().to_device(array)
        array[:] = -1  # the caller may use its memory again at once
        arrivals.append(copies().to_host(there + 0 * busy[:1000, :16]))
    for number, arrival in enumerate(arrivals):
        assert torch.equal(arrival(), torch.full((1000, 16), float(number)))


def test_parameters_are_written_after_queued_reads() -> None:
    target = torch.ones(1000, 1000, device="cuda")
    sums = []
    for number in range(2, 12):
        sums.append((target @ target).mean() / 1000)
        copies().write(target.view(-1), torch.full((1_000_000,), float(number)))
    expected = [float(number) ** 2 for number in range(1, 11)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.tensor(expected), rtol=1e-2, atol=0.1)


# -- layers that keep rows on a GPU train as those that copy all rows


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
def test_sync_training_is_equal_with_a_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
