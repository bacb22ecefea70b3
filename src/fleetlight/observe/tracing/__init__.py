# SPDX-License-Identifier: Apache-2.0
"""Traces of some steps of a running job: spans of all processes in one file for Perfetto."""
