# SPDX-License-Identifier: Apache-2.0
"""What every engine with connections needs to know of the sockets of its process."""
