# SPDX-License-Identifier: Apache-2.0
"""The network and the random data of the multi-machine document."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight import static


def mlp(input_x: Tensor, input_y: Tensor, hid_dim: int = 1280, label_dim: int = 2) -> Tensor:
    """Two layers of tanh and a softmax; the mean cost."""
    torch.manual_seed(0)
    fc_1 = torch.tanh(nn.Linear(32, hid_dim)(input_x))
    fc_2 = torch.tanh(nn.Linear(hid_dim, hid_dim)(fc_1))
    prediction = torch.softmax(nn.Linear(hid_dim, label_dim)(fc_2), 1)
    return -torch.log(prediction.gather(1, input_y)).mean()


def feeds() -> tuple[Tensor, Tensor]:
    """The two feeds; the batch is a dimension here."""
    input_x = static.data(name="x", shape=[None, 32], dtype="float32")
    return input_x, static.data(name="y", shape=[None, 1], dtype="int64")


def gen_data(step: int) -> dict[str, NDArray[np.generic]]:
    """A batch of random numbers, equal in each run."""
    draws = np.random.default_rng(step)
    return {
        "x": draws.random(size=(128, 32)).astype("float32"),
        "y": draws.integers(2, size=(128, 1)).astype("int64"),
    }
