# SPDX-License-Identifier: Apache-2.0
"""In which form gradients cross between hosts. Tensors in, tensors out: nothing is sent here."""
