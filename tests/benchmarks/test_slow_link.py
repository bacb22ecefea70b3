# SPDX-License-Identifier: Apache-2.0
"""The slow link: placement of workers, compared variants, and valid settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from benchmarks.slow_link import Bar, Section, Variant

from benchmarks import jobs, slow_link, slow_train
from fleetlight import DistributedStrategy


@dataclasses.dataclass(frozen=True)
class Place:
    prefix: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Places:
    """The part of a rig that a job reads."""

    hosts: tuple[Place, ...] = (Place(("in", "a")), Place(("in", "b")))
    addresses: tuple[str, ...] = ("10.0.0.1", "10.0.0.2")


def run(seconds: float, sent: int, checksum: float = 1.0) -> jobs.Run:
    one: dict[str, Any] = {"steps": 2, "seconds": seconds, "cpu_seconds": 1.0, "sent": sent}
    return jobs.Run(9.0, 1.0, 0.0, [{**one, "checksum": checksum}, {**one, "sent": 0}])


@pytest.mark.parametrize(
    ("alternating", "hosts", "local"),
    [(False, "aabb", "0101"), (True, "abab", "0011")],
    ids=["blocks", "alternating"],
)
def test_workers_are_placed_in_the_requested_order(
    alternating: bool, hosts: str, local: str
) -> None:
    variant = Variant("flat", alternating=alternating)
    job = slow_link.job(variant, "train", Places())  # type: ignore[arg-type]
    assert "".join(command.argv[1] for command in job.commands) == hosts
    assert "".join(command.environment["LOCAL_RANK"] for command in job.commands) == local
    assert [command.environment["RANK"] for command in job.commands] == list("0123")


def test_only_encrypted_variants_get_certificates() -> None:
    for variant in slow_link.TLS.variants:
        job = slow_link.job(variant, "train", Places(), ssl="certs")  # type: ignore[arg-type]
        argv = job.commands[0].argv
        strategy = json.loads(argv[argv.index("--strategy") + 1])
        assert strategy.get("ssl") == ("certs" if variant.encrypted else None)


def test_the_settings_of_every_variant_are_valid() -> None:
    for section in slow_link.SECTIONS.values():
        names = [variant.name for variant in section.variants]
        assert len(set(names)) == len(names)
        assert {name for bar in section.bars for name in (bar.over, bar.under)} <= set(names)
        for variant in section.variants:
            again = json.loads(json.dumps(dict(variant.settings)))
            DistributedStrategy(**again)


def test_time_and_bytes_have_separate_bars() -> None:
    section = Section(
        "Title",
        "reduce",
        [Variant("flat"), Variant("small")],
        [Bar("small", "flat", 2.0, 0.3), Bar("small", "flat", 5.0, 0.2)],
    )
    runs = {"flat": [run(8.0, 8 << 20)], "small": [run(2.0, 2 << 20)]}
    text = slow_link.written(section, runs)
    assert "## Title, links of 200 Mbit/s" in text
    assert "| flat | 4.00 (4.00..4.00) | 0.500 (0.500..0.500) | 4.00 (4.00..4.00) |" in text
    first, second = (line for line in text.splitlines() if line.startswith("| small / flat"))
    assert "2.00: met" in first
    assert "0.300: met" in first
    assert "5.00: missed" in second
    assert "0.200: missed" in second


def test_published_figures_are_listed_next_to_ours() -> None:
    flat, dgc = (variant.name for variant in slow_link.DGC_CLAIM.variants)
    runs = {flat: [run(8.0, 8 << 20)], dgc: [run(2.0, 2 << 20)]}
    found = {slow_link.DGC_CLAIM.title: slow_link.reached(slow_link.DGC_CLAIM, runs)}
    [text] = slow_link.published(found)
    assert f"6.53 | {dgc}: 4.00 (4.00..4.00) |" in text
    assert "LocalSGD" not in text
    assert slow_link.published({}) == []


def test_workers_that_end_with_different_values_are_an_error() -> None:
    broken = run(1.0, 1)
    broken.results[1]["checksum"] = 2.0
    with pytest.raises(jobs.BenchmarkError, match="differs"):
        slow_link._agreed("flat", [broken])


def test_backward_gives_the_known_gradients() -> None:
    torch.manual_seed(0)
    model = slow_train.Known(torch.nn.Linear(3, 2), seed=1)
    for _ in range(2):
        model.zero_grad()
        model(torch.zeros(1)).sum().backward()
        for parameter, known in zip(model.model.parameters(), model.known, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, known)
            # a reduction in place must not change the known gradient
            parameter.grad += 1


def test_bytes_are_counted_per_interface() -> None:
    assert slow_train.counters().get("lo", 0) >= 0
    assert slow_train.sent_bytes() >= 0


def test_the_model_has_the_size_on_the_page() -> None:
    sizes = [a * b + b for a, b in zip(slow_train.WIDTHS, slow_train.WIDTHS[1:], strict=False)]
    assert 4 * sum(sizes) / 2**20 == slow_link.MODEL_MIB
