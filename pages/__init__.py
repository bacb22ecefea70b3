# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ that are made from code and results; `python -m pages` writes them."""
