# SPDX-License-Identifier: Apache-2.0
"""Generated tables, and the distributions and the model behind them."""
