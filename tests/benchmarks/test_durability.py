# SPDX-License-Identifier: Apache-2.0
"""Durability: the same job with and without; what is compared."""

from __future__ import annotations

import dataclasses

from benchmarks import durability


def test_variants_differ_in_nothing_else() -> None:
    made = durability.variants("sync", 5.0, "certs")
    assert set(durability.AT_LEAST) | {durability.NONE} == set(made)
    plain = made[durability.NONE]
    assert (plain.durability, plain.ssl, plain.lookahead) == ("none", "", True)
    assert "--count" in plain.job().commands[-1].argv
    for name, of in made.items():
        changes = {"name": name, "durability": of.durability, "ssl": of.ssl}
        assert dataclasses.replace(plain, **changes) == of
    log, tls = made[durability.LOG], made[durability.TLS]
    assert "--durability log" in " ".join(log.job().commands[0].argv)
    assert "--ssl certs" in " ".join(tls.job().commands[0].argv)
