# SPDX-License-Identifier: Apache-2.0
"""What a process is in its job: `fleet.init` makes one of them, the only choice of mode."""
