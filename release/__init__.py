# SPDX-License-Identifier: Apache-2.0
"""What a release publishes, and the check of it: `make release-check`, `make sbom`."""
