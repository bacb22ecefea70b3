# SPDX-License-Identifier: Apache-2.0
"""One file per dialect: `NAME`, `present(env)` and `read(env)`; each is complete on its own."""
