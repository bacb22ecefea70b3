# SPDX-License-Identifier: Apache-2.0
"""The check of what a release publishes: `make release-check`."""
