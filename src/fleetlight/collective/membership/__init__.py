# SPDX-License-Identifier: Apache-2.0
"""Which workers belong to the job, where they meet, and whether they are alive."""
