# SPDX-License-Identifier: Apache-2.0
"""What passes share: new nodes, reductions, slots between runs, memory layouts, regions."""
