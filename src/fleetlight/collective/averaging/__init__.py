# SPDX-License-Identifier: Apache-2.0
"""Workers that train alone, and meet now and then to take the mean of what each has learned."""
