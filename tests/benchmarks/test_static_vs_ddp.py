# SPDX-License-Identifier: Apache-2.0
"""Static programs compared with DDP: the ratios, and a quick run of both."""

from __future__ import annotations

import pytest

from benchmarks import report, static_vs_ddp

pytestmark = pytest.mark.long


def series(**rates: list[float]) -> list[report.Series]:
    return [report.Series(name.replace("_", " "), of, of) for name, of in rates.items()]


def test_variants_are_compared_with_plain_and_compiled_ddp() -> None:
    found = static_vs_ddp.ratios(
        "tiny",
        series(
            ddp=[100.0, 50.0, 100.0],
            compiled_ddp=[80.0, 50.0, 100.0],
            static_fx=[120.0, 60.0, 120.0],
            static_inductor=[140.0, 59.0, 130.0],
        ),
    )
    output = {(r.over.name, r.under.name): (r.spread.median, r.at_least) for r in found}
    assert output == {
        ("compiled ddp", "ddp"): (1.0, None),
        ("static fx", "ddp"): (1.2, 1.10),
        ("static inductor", "ddp"): (1.3, 1.3),
        ("best static", "compiled ddp"): (1.3, 1.2),
    }


def test_a_ratio_without_a_claim_has_no_bar() -> None:
    (ratio,) = static_vs_ddp.ratios("mlp8", series(ddp=[1.0], static_fx=[2.0]))
    assert ratio.verdict == "-"


@pytest.mark.multiprocess
def test_a_quick_run_measures_and_writes_no_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write", None)
    argv = ["--quick", "--rounds", "1", "--workloads", "tiny", "--variants", "ddp", "static fx"]
    assert static_vs_ddp.main(argv) == 0
    output = capsys.readouterr().out
    assert "| static fx / ddp |" in output
    assert "CPU s to capture" in output
