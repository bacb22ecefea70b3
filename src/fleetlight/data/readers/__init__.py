# SPDX-License-Identifier: Apache-2.0
"""Readers of well-known data sets from local files. Nothing here ever downloads anything.

Image data sets are map-style, of `(image, label)`: float32 `[C, H, W]` in 0..1, and an int from
0. Tables are map-style data sets of named tuples in memory; `FileStream` uses their `parse` too.
"""
