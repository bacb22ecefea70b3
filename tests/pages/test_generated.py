# SPDX-License-Identifier: Apache-2.0
"""The generated files of docs/ are those that the code and the results give now."""

from __future__ import annotations

import pytest
from pages.generated import outdated
from pages.variables import MEANINGS, own_variables


def test_generated_files_are_current() -> None:
    changed = outdated()
    assert not changed, f"run `python -m pages`, which writes {', '.join(changed)}"


def test_every_variable_of_fleetlight_has_a_meaning() -> None:
    assert set(MEANINGS) == own_variables()


def test_settings_page_links_to_fields_only() -> None:
    from pages.settings import _MORE

    from fleetlight.strategy import DistributedStrategy

    assert set(_MORE) <= set(DistributedStrategy().keys())


@pytest.mark.parametrize("name", ["reference/index.md", "reference/errors.md"])
def test_missing_page_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pages import generated

    monkeypatch.setattr(generated, "DOCS", generated.DOCS / "nowhere")
    assert name in generated.outdated()
