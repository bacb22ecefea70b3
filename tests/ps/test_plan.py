# SPDX-License-Identifier: Apache-2.0
"""Comparison of plans by digest and by first difference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.ps.serving import plan

from fleetlight.ps.plan import DensePlan, Plan, RulePlan, first_difference


def changed(of: Plan, **facts: Any) -> Plan:
    return msgspec.structs.replace(of, **facts)


def table(of: Plan, number: int, **facts: Any) -> Plan:
    tables = list(of.tables)
    tables[number] = msgspec.structs.replace(tables[number], **facts)
    return changed(of, tables=tables)


def test_equal_plans_have_equal_digests() -> None:
    assert first_difference(plan(), plan()) is None
    assert plan().digest() == plan().digest()
    assert plan().digest() != plan(workers=3).digest()


ONE = plan()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (changed(ONE, mode="async"), "plan.mode: 'sync' here, 'async' there"),
        (table(ONE, 1, dim=9), "plan.tables[items].dim: 2 here, 9 there"),
        (table(ONE, 0, dtype="bf16"), "plan.tables[users].dtype: 'fp32' here, 'bf16' there"),
        (table(ONE, 1, wire="bf16"), "plan.tables[items].wire: 'fp32' here, 'bf16' there"),
        (
            table(ONE, 0, rule=RulePlan("adagrad", {"initial_accumulator_value": 0.0})),
            "plan.tables[users].rule.name: 'sgd' here, 'adagrad' there",
        ),
        (changed(ONE, tables=ONE.tables[:1]), "plan.tables[items]: 'present' here, 'absent' there"),
        (
            changed(ONE, dense=[*ONE.dense, DensePlan("more", (1,), "float32", 0, 0)]),
            "plan.dense[more]: 'absent' here, 'present' there",
        ),
        (
            changed(ONE, optimizers=ONE.optimizers * 2),
            "plan.optimizers: number of entries: 1 here, 2 there",
        ),
        (changed(ONE, tables=ONE.tables[::-1]), "plan.tables[0].name: 'users' here, 'items' there"),
    ],
)
def test_the_first_difference_is_named(other: Plan, expected: str) -> None:
    assert first_difference(ONE, other) == expected
    assert ONE.digest() != other.digest()


def test_table_returns_the_number_of_a_name() -> None:
    assert ONE.table("items") == 1
    with pytest.raises(KeyError):
        ONE.table("nothing")
