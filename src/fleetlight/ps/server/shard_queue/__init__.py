# SPDX-License-Identifier: Apache-2.0
"""Server 0 hands out the records of loaders on demand."""
