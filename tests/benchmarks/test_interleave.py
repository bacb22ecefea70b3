# SPDX-License-Identifier: Apache-2.0
"""Interleaved variants: equal steps, in alternating order."""

from __future__ import annotations

from benchmarks import interleave


def test_turns_alternate_their_order_after_a_barrier() -> None:
    seen: list[str] = []
    variants = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    interleave.interleave(variants, rounds=1, turns=2, steps=2, meet=lambda: seen.append("|"))
    assert "".join(seen) == "|aa|bb|bb|aa"


def test_every_round_reports_all_its_steps() -> None:
    rounds = interleave.interleave({"a": int}, rounds=3, turns=4, steps=5, meet=int)
    assert [r["steps"] for r in rounds] == [20, 20, 20]
    assert all(0 < r["seconds"]["a"][0] <= r["wall_s"] for r in rounds)


def worker(wall: float, cpu: float) -> list[dict[str, object]]:
    """One round of ten steps, as a worker reports it."""
    seconds = {"a": [wall, cpu]}
    return [{"steps": 10, "seconds": seconds, "wall_s": wall, "busy_s": None, "cpu_s": cpu}]


def test_the_slowest_worker_sets_the_rate() -> None:
    (one,) = interleave.series([worker(2.0, 1.0), worker(5.0, 2.0)])
    assert one.rates == [2.0]
    assert one.cpu_ms == [150.0]


def test_unmeasured_load_stays_unknown() -> None:
    assert interleave.foreign([worker(2.0, 1.0)]) == [None]
