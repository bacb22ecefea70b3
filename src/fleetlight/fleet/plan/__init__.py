# SPDX-License-Identifier: Apache-2.0
"""What the servers of a job keep of the registered models: tables and dense parameters."""
