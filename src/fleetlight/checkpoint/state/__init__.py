# SPDX-License-Identifier: Apache-2.0
"""The state of models, optimizers, workers and random number generators."""
