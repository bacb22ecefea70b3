# SPDX-License-Identifier: Apache-2.0
"""Tables in checkpoints, in exported models and in what a worker asks of servers."""
