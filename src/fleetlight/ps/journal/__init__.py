# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log of a server: its files, and the folder that has them."""
