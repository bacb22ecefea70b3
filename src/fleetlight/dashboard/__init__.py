# SPDX-License-Identifier: Apache-2.0
"""The live page of a job: what its processes do, read from its log folder."""
