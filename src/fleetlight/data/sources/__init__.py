# SPDX-License-Identifier: Apache-2.0
"""The records of a loader, as one worker gets them."""
