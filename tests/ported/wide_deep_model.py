# SPDX-License-Identifier: Apache-2.0
"""The Wide&Deep model of the documents of FleetX and GeoSGD, on generated clicks."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static

FIELDS, IDS = 4, 200


class WideDeepModel(nn.Module):
    """`net()` writes the program, as in the document; the model itself is never called."""

    cost: Tensor
    inference_target_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = fleet.nn.SparseEmbeddingBag(1, "sum", initializer="zeros")
        self.deep = fleet.nn.SparseEmbedding(4)
        self.tower = nn.Sequential(nn.Linear(4 * FIELDS, 16), nn.ReLU(), nn.Linear(16, 1))

    def net(self, is_train: bool = True) -> None:
        ids = static.data("ids", [None, FIELDS], "int64")
        click = static.data("click", [None, 1], "float32")
        score = self.wide(ids) + self.tower(self.deep(ids).flatten(1))
        self.inference_target_var = torch.sigmoid(score)
        self.cost = F.binary_cross_entropy_with_logits(score, click)
        self.loader = static.bind(_Clicks(), [ids, click])


class _Clicks:
    """The batches of the loader, which are sharded after `fleet.init`."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        draws = torch.Generator().manual_seed(3)
        taste = torch.randn(IDS, generator=draws) * 1.5
        ids = torch.randint(0, IDS, (2000, FIELDS), generator=draws)
        chance = torch.sigmoid(taste[ids].sum(1, keepdim=True))
        clicks = (torch.rand(2000, 1, generator=draws) < chance).float()
        mine = slice(fleet.worker_index(), None, fleet.worker_num())
        return iter(DataLoader(TensorDataset(ids[mine], clicks[mine]), 20, drop_last=True))
