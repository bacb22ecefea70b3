# SPDX-License-Identifier: Apache-2.0
"""The job of workers whose gradients go to parameter servers."""
