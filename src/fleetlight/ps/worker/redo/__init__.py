# SPDX-License-Identifier: Apache-2.0
"""What a worker writes down, so that a later life of it goes on where it died."""
