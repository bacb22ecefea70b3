# SPDX-License-Identifier: Apache-2.0
"""Known flags that fleetrun refuses."""

import pytest

from fleetlight.cli.refused_flags import REFUSED, refusal


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_every_refusal_names_the_flag_and_gives_advice(flag: str) -> None:
    text = str(refusal(flag))
    assert flag in text
    assert any(word in text for word in ("use", "omit the flag", "chooses", "decide"))
