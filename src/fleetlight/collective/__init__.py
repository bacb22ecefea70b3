# SPDX-License-Identifier: Apache-2.0
"""Workers that train one model together: membership, liveness, the gradient reducer."""
