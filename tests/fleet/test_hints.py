# SPDX-License-Identifier: Apache-2.0
"""Hints for the names of other systems."""

import re
from operator import attrgetter

import pytest

import fleetlight as fleet
from fleetlight.fleet.hints import HINTS


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("get_rank", "fleet.worker_index()"),
        ("get_world_size", "fleet.worker_num()"),
        ("broadcast", "fleet.all_gather(value)[0]"),
        ("save", "fleet.save_persistables(dirname)"),
        ("print", "if fleet.is_first_worker(): print"),
    ],
)
def test_error_names_the_replacement(name: str, instead: str) -> None:
    text = re.escape(f"module 'fleetlight' has no attribute {name!r}; use ")
    with pytest.raises(AttributeError, match=f"{text}.*{re.escape(instead)}"):
        getattr(fleet, name)


def test_no_hint_hides_a_public_name() -> None:
    assert not set(HINTS) & {*fleet.__all__, "main_program"}


def test_hints_name_existing_attributes() -> None:
    named = {path for text in HINTS.values() for path in re.findall(r"fleet\.([\w.]*\w)", text)}
    assert len(named) > 20
    for path in named:
        assert attrgetter(path)(fleet), path
