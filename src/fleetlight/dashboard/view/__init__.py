# SPDX-License-Identifier: Apache-2.0
"""What the page shows, computed from metrics. Pure: no files, clocks or sockets."""
