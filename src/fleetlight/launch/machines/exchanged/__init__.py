# SPDX-License-Identifier: Apache-2.0
"""What launchers exchange in the store while a job runs."""
