# SPDX-License-Identifier: Apache-2.0
"""Where metrics of a job go besides its log folder: TensorBoard, MLflow, Weights & Biases."""
