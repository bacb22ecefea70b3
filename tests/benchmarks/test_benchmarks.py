# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each runs, as short as it can; and the arithmetic that a claim depends on."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills, report, scaling

ROOT = Path(__file__).parents[2]
#: what is printed; the options beside --quick
SMOKE = {
    "async_quality": ("2 workers and 2 servers", ["--optimizers", "SGD", "--modes", "async"]),
    "chaos": ("no fault was found", ["--only", "fuzzing"]),
    "columnar": ("loader's share", ["--codecs", "snappy"]),
    "durability": ("log / none", ["--modes", "async", "--only", "none", "log"]),
    "eager_vs_ddp": ("fleetlight / ddp", ["--workloads", "mnist"]),
    "gpu": ("rows on a server / plain torch", ["--device", "cpu", "--models", "wide_deep"]),
    "interleave": ("b / a", ["--job", "a=cat {line}", "--job", "b=cat {line}"]),
    "kernels": ("pull, zipf", []),
    "kills": ("SIGKILL of worker 1", []),
    "launch_overhead": ("fleetrun --help", []),
    "peers_collective": ("fleetlight / ddp", ["--models", "mlp"]),
    "peers_ps": ("fleetlight, geo", ["--models", "word2vec", "--only", "fleetlight, geo"]),
    "ps_modes": ("one process", ["--models", "word2vec", "--only", "one process", "sync"]),
    "recovery": ("s until the rows were read again", []),
    "scaling": ("server CPU", ["--plan", "example"]),
    "serving": ("A reader starts", []),
    "static_ps": ("geo, static", ["--models", "word2vec", "--only", "geo, static"]),
    "static_vs_ddp": ("static fx", ["--workloads", "tiny", "--variants", "ddp", "static fx"]),
    "storage": ("A delta has", []),
    "two_versions": ("version / ", ["--other", "src", "--models", "word2vec", "--modes", "geo"]),
    "wire": ("A pull of 20,000 ids", []),
}  # fmt: skip
#: they need a network of their own
AS_ROOT = ("geo_link", "slow_link")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMOKE)
def test_it_runs(name: str, tmp_path: Path) -> None:
    shown, options = SMOKE[name]
    line = tmp_path / "line"
    line.write_text('RESULT {"steps": 10, "seconds": 2.0}\n')
    told = [option.format(line=line) for option in options]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *told]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert shown in done.stdout


@pytest.mark.long
@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs iproute2")
def test_it_runs_over_a_slow_link() -> None:
    command = [sys.executable, "-m", "benchmarks.geo_link", "--quick", "--k_steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "GeoSGD was slower than async at" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_ROOT)
def test_options_are_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_a_ratio_is_taken_round_by_round() -> None:
    fast, slow = report.Series("fast", [2.0, 9.0, 4.0]), report.Series("slow", [1.0, 3.0, 4.0])
    ratio = report.Ratio(fast, slow, at_least=2.5)
    assert ratio.row() == ("fast / slow", "2.00 (1.00..3.00)", "2.50: missed", "2.000 3.000 1.000")


def test_a_dip_ends_when_the_rate_is_back() -> None:
    # half a second a bin: 5 s before the kill, one second without training
    found = kills.dip([10.0] * 10 + [0.0, 0.0] + [10.0] * 8, at=5.0, until=10.0)
    assert (found.before, found.lowest, found.back_s, found.lost_s) == (10.0, 0.0, 2.0, 1.0)


def test_what_limits_a_large_job() -> None:
    step_s, limit, use = scaling.predict(scaling.EXAMPLE, scaling.Layout(1000, 16, 16, 16, 1e10))
    assert limit == scaling.SERVER_CPU
    assert 1000 * 512 / step_s == pytest.approx(211_899, rel=1e-3)
    assert use["worker"] == pytest.approx(0.018, abs=1e-3)


@pytest.mark.parametrize(("needed", "log"), [(100, 0.986), (1100, 0.867)], ids=["async", "sync"])
def test_the_work_that_failures_leave(needed: int, log: float) -> None:
    with_checkpoints, every_s, with_log = scaling.goodput(1100, needed, 864_000, 120, 1)
    assert with_checkpoints == pytest.approx(0.816, abs=5e-4)
    assert every_s == pytest.approx(40, abs=1)
    assert with_log == pytest.approx(log, abs=5e-4)
