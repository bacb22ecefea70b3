# SPDX-License-Identifier: Apache-2.0
"""The job of workers without servers, which reduce all gradients themselves."""
