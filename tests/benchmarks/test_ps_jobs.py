# SPDX-License-Identifier: Apache-2.0
"""Jobs of parameter servers: a tiny one runs, and its figures are correct."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.peers import ps_timed
from benchmarks.ps_jobs import Bar, Figures, Ours, section
from benchmarks.ps_models import MODELS, Bags

from benchmarks import geo_link, jobs, narrow_link, peers_ps, ps_modes, static_ps

pytestmark = pytest.mark.long


def result(**facts: Any) -> dict[str, Any]:
    """The result that a worker prints."""
    usual = {"examples": 1000, "seconds": 2.0, "cpu_seconds": 3.0, "server_cpu_seconds": 4.0}
    return {**usual, "server_mib": 5.0, "worker_mib": 6.0, "steps": 10, **facts}


def run(*results: dict[str, Any]) -> jobs.Run:
    """A run with these results."""
    return jobs.Run(1.0, 1.0, 0.0, list(results))


def test_a_job_with_a_server_and_two_workers_reports_both() -> None:
    # a program runs both kinds
    job = Ours("tiny", "word2vec", "async", steps=3, system="static", warmup=1).job()
    found = jobs.run(job)
    assert len(found.results) == 2
    figures = Figures.of("tiny", [found])
    assert figures.rates[0] > 0
    # the server was found, and is a separate process
    assert figures.server_mib[0] > 50


def test_workers_add_up_and_the_server_counts_once() -> None:
    figures = Figures.of("two", [run(result(), result(seconds=4.0))])
    assert figures.rates == [750.0]
    assert figures.per_cpu_s == [2000 / 10.0]
    assert figures.row()[3:] == ("5", "6")


def test_bars_of_omitted_variants_are_omitted() -> None:
    runs = {"a": [run(result())], "b": [run(result(seconds=1.0))]}
    text = section("title", runs, [Bar("b", "a", 1.9), Bar("c", "a", 1.0)], [0.0])
    assert "| b / a | 2.00 (2.00..2.00) | 1.90: met | 2.000 |" in text
    assert "c / a" not in text


@pytest.mark.parametrize("model", MODELS)
def test_a_model_accepts_its_batches(model: str) -> None:
    batch = ps_timed.batches(model, 0, count=1)[0]
    tensors = [torch.from_numpy(array) for array in batch]
    logits = MODELS[model](Bags)(*tensors[:-1])
    assert logits.shape == tensors[-1].shape


def test_batches_depend_on_the_rank() -> None:
    first, again, other = (ps_timed.batches("word2vec", rank, 1)[0] for rank in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])
    assert first[1].min() >= 0
    assert first[1].max() < ps_timed.ROWS["word2vec"]


def test_every_bar_names_existing_variants() -> None:
    for model in MODELS:
        for page in (ps_modes, static_ps):
            names = set(page.variants(model, 1))
            assert {name for bar in page.bars(model) for name in (bar.over, bar.under)} <= names
    known = set(geo_link.variants([100, 400], {"async": 1, "geo": 1}))
    assert {geo_link.name_of(k) for k in geo_link.AT_LEAST} <= known
    for model, wire in narrow_link.AT_LEAST:
        assert wire in narrow_link.variants(model, 1)


def test_peers_that_are_not_installed_are_omitted() -> None:
    chosen = peers_ps._parse(["--modes", "sync", "async"])
    names = set(peers_ps.variants("word2vec", chosen))
    assert names == {peers_ps.ALONE, "fleetlight, sync", "fleetlight, async"}
    chosen = peers_ps._parse(["--paddle2", "sh"])
    assert "paddle 2.6.2, geo" in peers_ps.variants("word2vec", chosen)
    assert "paddle 2.6.2, sync" not in peers_ps.variants("word2vec", chosen)
