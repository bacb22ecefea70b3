# SPDX-License-Identifier: Apache-2.0
"""The job of workers that send gradients to parameter servers."""
