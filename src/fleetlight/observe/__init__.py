# SPDX-License-Identifier: Apache-2.0
"""What a job lets its people see: log lines, progress, metrics over all workers."""
