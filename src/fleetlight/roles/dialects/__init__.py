# SPDX-License-Identifier: Apache-2.0
"""One file per dialect, each complete on its own, with a `Dialect` named `DIALECT`."""
