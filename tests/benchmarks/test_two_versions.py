# SPDX-License-Identifier: Apache-2.0
"""Two versions: the same job with the sources of another folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks.jobs import ROOT, BenchmarkError

from benchmarks import two_versions


def test_the_jobs_differ_only_in_their_sources() -> None:
    variants = two_versions.variants("word2vec", "async, staleness 4", "/before/src")
    current, other = variants[two_versions.THIS], variants[two_versions.OTHER]
    assert dataclasses.replace(current, name=other.name, source="/before/src") == other
    assert "--staleness 4" in " ".join(current.job().commands[-1].argv)
    assert "PYTHONPATH" not in current.job().commands[0].environment
    for command in other.job().commands:
        assert command.environment["PYTHONPATH"] == f"/before/src:{ROOT}"


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no fleetlight in"):
        two_versions.main(["--other", str(tmp_path), "--no-write"])
