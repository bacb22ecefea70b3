# SPDX-License-Identifier: Apache-2.0
"""Texts as word ids, and the pairs of words that word vectors are trained on."""
