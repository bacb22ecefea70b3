# SPDX-License-Identifier: Apache-2.0
"""One module on all workers, whose gradients are reduced during backward."""
