# SPDX-License-Identifier: Apache-2.0
"""The output of processes: shown, held back where another process is the cause, read from logs."""
