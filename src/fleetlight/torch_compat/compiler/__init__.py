# SPDX-License-Identifier: Apache-2.0
"""torch's compiler: kept out of a process until it is used, and called for graphs."""
