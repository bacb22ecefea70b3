# SPDX-License-Identifier: Apache-2.0
"""Static programs beside DDP: what is compared, and that both train in one pair of processes."""

from __future__ import annotations

import pytest

from benchmarks import report, static_vs_ddp

pytestmark = pytest.mark.long


def series(**rates: list[float]) -> list[report.Series]:
    return [report.Series(name.replace("_", " "), of, of) for name, of in rates.items()]


def test_each_is_compared_with_plain_ddp_and_the_best_of_ours_with_the_compiled_one() -> None:
    found = static_vs_ddp.ratios(
        "tiny",
        series(
            ddp=[100.0, 50.0, 100.0],
            compiled_ddp=[80.0, 50.0, 100.0],
            static_fx=[120.0, 60.0, 120.0],
            static_inductor=[140.0, 59.0, 130.0],
        ),
    )
    told = {(r.over.name, r.under.name): (r.spread.median, r.at_least) for r in found}
    assert told == {
        ("compiled ddp", "ddp"): (1.0, None),
        ("static fx", "ddp"): (1.2, 1.10),
        ("static inductor", "ddp"): (1.3, 1.3),
        ("best static", "compiled ddp"): (1.3, 1.2),
    }


def test_what_is_not_claimed_of_a_workload_has_no_bar() -> None:
    (ratio,) = static_vs_ddp.ratios("mlp8", series(ddp=[1.0], static_fx=[2.0]))
    assert ratio.verdict == "-"


@pytest.mark.multiprocess
def test_a_quick_run_measures_and_writes_no_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write", None)
    argv = ["--quick", "--rounds", "1", "--workloads", "tiny", "--variants", "ddp", "static fx"]
    assert static_vs_ddp.main(argv) == 0
    told = capsys.readouterr().out
    assert "| static fx / ddp |" in told
    assert "CPU s to capture" in told
