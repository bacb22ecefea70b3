# SPDX-License-Identifier: Apache-2.0
"""The model of Fleet's static quick start: two layers of tanh on images of digits."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fleetlight import static


def mnist_on_mlp_model() -> tuple[TensorDataset, TensorDataset, Tensor, Tensor, Tensor, Tensor]:
    """Training data, test data, the feeds, cost and accuracy, as in the document."""
    train_dataset, test_dataset = digits("train"), digits("test")
    x = static.data(name="x", shape=[64, 1, 28, 28], dtype="float32")
    y = static.data(name="y", shape=[64, 1], dtype="int64")
    torch.manual_seed(0)
    x_flatten = torch.reshape(x, [64, 784])
    fc_1 = torch.tanh(nn.Linear(784, 128)(x_flatten))
    fc_2 = torch.tanh(nn.Linear(128, 128)(fc_1))
    prediction = torch.softmax(nn.Linear(128, 10)(fc_2), 1)
    cost = -torch.log(prediction.gather(1, y))
    acc_top1 = static.accuracy(input=prediction, label=y, k=1)
    avg_cost = torch.mean(cost)
    return train_dataset, test_dataset, x, y, avg_cost, acc_top1


def digits(mode: str) -> TensorDataset:
    """Real digits of 8 by 8 points, enlarged; the last 256 are the test set."""
    found = load_digits()
    images = np.pad(np.kron(found.images / 16, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    part = slice(0, -256) if mode == "train" else slice(-256, None)
    pixels = torch.tensor(images[part, None], dtype=torch.float32)
    # labels are rows of numbers; the program declares a column
    return TensorDataset(pixels, torch.tensor(found.target[part]))
