# SPDX-License-Identifier: Apache-2.0
"""Durability: the compared variants of one job."""

from __future__ import annotations

import dataclasses

from benchmarks import durability


def test_variants_differ_only_in_durability_and_ssl() -> None:
    variants = durability.variants("sync", 5.0, "certs")
    assert set(durability.ALL) == set(variants)
    plain = variants[durability.NONE]
    assert (plain.durability, plain.ssl, plain.lookahead) == ("none", "", True)
    assert "--count" in plain.job().commands[-1].argv
    for name, variant in variants.items():
        changes = {
            "name": name,
            "durability": variant.durability,
            "ssl": variant.ssl,
            "shared_memory": variant.shared_memory,
        }
        assert dataclasses.replace(plain, **changes) == variant
    log, tls = variants[durability.LOG], variants[durability.TLS]
    # TLS differs from its counterpart in nothing else
    assert dataclasses.replace(variants[durability.TCP], name=tls.name, ssl="certs") == tls
    assert "--no_shared_memory" in tls.job().commands[0].argv
    assert "--durability log" in " ".join(log.job().commands[0].argv)
    assert "--ssl certs" in " ".join(tls.job().commands[0].argv)
