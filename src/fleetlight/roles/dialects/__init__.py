# SPDX-License-Identifier: Apache-2.0
"""The dialects, one file each, with a `Dialect` named `DIALECT`."""
