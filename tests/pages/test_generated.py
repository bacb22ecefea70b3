# SPDX-License-Identifier: Apache-2.0
"""The generated files of docs/ are those that the code and the results give now."""

from __future__ import annotations

import pytest
from pages.charts import charts
from pages.commands import commands_page
from pages.generated import DOCS, outdated
from pages.settings import _MORE, settings_page
from pages.variables import MEANINGS, own_variables, variables_page

from fleetlight.strategy import DistributedStrategy


def test_generated_pages_are_current() -> None:
    changed = outdated({**settings_page(), **commands_page(), **variables_page()})
    assert not changed, f"run `make pages`, which writes {', '.join(changed)}"


def test_charts_are_current() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    written = (DOCS / "images" / "chart-peers.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in written:
        pytest.skip("another version of matplotlib has drawn the charts")
    changed = outdated(charts())
    assert not changed, f"run `make pages`, which writes {', '.join(changed)}"


def test_missing_page_is_found() -> None:
    assert outdated({"reference/nowhere.md": ""}) == ["reference/nowhere.md"]


def test_every_variable_of_fleetlight_has_a_meaning() -> None:
    assert set(MEANINGS) == own_variables()


def test_settings_page_links_to_fields_only() -> None:
    assert set(_MORE) <= set(DistributedStrategy().keys())
