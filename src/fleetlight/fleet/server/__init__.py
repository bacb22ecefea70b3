# SPDX-License-Identifier: Apache-2.0
"""The job of a parameter server."""
