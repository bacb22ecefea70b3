# SPDX-License-Identifier: Apache-2.0
"""What a worker logs, so that its next incarnation resumes where this one died."""
