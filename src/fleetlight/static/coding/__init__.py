# SPDX-License-Identifier: Apache-2.0
"""From forms to functions that run: each keeps just what one kind of run needs."""
