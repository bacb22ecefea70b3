# SPDX-License-Identifier: Apache-2.0
"""Who is connected, who waits for whom, and barriers."""
