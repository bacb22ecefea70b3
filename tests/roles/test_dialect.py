# SPDX-License-Identifier: Apache-2.0
"""Reading single variables."""

import pytest

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Variables


def read(**env: str) -> Variables:
    return Variables(env, "TEST_*")


def test_empty_and_blank_count_as_absent() -> None:
    assert read(A="").get("A") is None
    assert read(A="  ").get("A") is None
    assert read(A=" x ").get("A") == "x"
    assert not read(A=" ").any("A", "B")
    assert read(B="1").any("A", "B")


def test_error_names_dialect_variable_and_value() -> None:
    with pytest.raises(RoleError, match=r"TEST_\*: A is not set, but is required"):
        read().text("A")
    with pytest.raises(RoleError, match=r"TEST_\*: A='1e3', expected a whole number >= 0"):
        read(A="1e3").number("A")


def test_numbers() -> None:
    assert read(A="007").number("A") == 7
    assert read().number_or("A", 5) == 5
    with pytest.raises(RoleError, match="A='x'"):
        read(A="x").number_or("A", 5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_seconds_are_positive_and_finite(text: str) -> None:
    with pytest.raises(RoleError, match=f"A='{text}', expected seconds above 0"):
        read(A=text).seconds_or("A", None)


def test_seconds_may_be_fractions() -> None:
    assert read(A="0.5").seconds_or("A", None) == 0.5
    assert read().seconds_or("A", 3.0) == 3.0
