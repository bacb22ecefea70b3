# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each claim of speed has a script here and a dated result under `results/`."""
