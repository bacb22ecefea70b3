# SPDX-License-Identifier: Apache-2.0
"""Commands that show what a running job does."""
