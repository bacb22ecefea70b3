# SPDX-License-Identifier: Apache-2.0
"""The features of `DistributedStrategy`, one file each."""
