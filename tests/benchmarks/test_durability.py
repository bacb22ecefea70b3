# SPDX-License-Identifier: Apache-2.0
"""Durability: the compared variants of one job."""

from __future__ import annotations

import dataclasses

from benchmarks import durability


def test_variants_differ_only_in_durability_and_ssl() -> None:
    variants = durability.variants("sync", 5.0, "certs")
    assert set(durability.AT_LEAST) | {durability.NONE} == set(variants)
    plain = variants[durability.NONE]
    assert (plain.durability, plain.ssl, plain.lookahead) == ("none", "", True)
    assert "--count" in plain.job().commands[-1].argv
    for name, variant in variants.items():
        changes = {"name": name, "durability": variant.durability, "ssl": variant.ssl}
        assert dataclasses.replace(plain, **changes) == variant
    log, tls = variants[durability.LOG], variants[durability.TLS]
    assert "--durability log" in " ".join(log.job().commands[0].argv)
    assert "--ssl certs" in " ".join(tls.job().commands[0].argv)
