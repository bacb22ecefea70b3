# SPDX-License-Identifier: Apache-2.0
"""Three recommenders, their data, and a loop that does not depend on Fleetlight."""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH, FIELDS, NUMBERS = 12, 16, 3, 4
#: ids of each field
SIZES = (40, 25, 12)
Batch = tuple[Tensor, Tensor, Tensor]
Penalty = Callable[[Any, Tensor], Tensor]


def data(dtype: torch.dtype, seed: int = 0) -> tuple[list[Batch], Batch]:
    """Training batches and one validation batch: ids, numbers, two labels."""
    generator = torch.Generator().manual_seed(seed)

    def batch(size: int) -> Batch:
        ids = torch.stack([torch.randint(n, (size,), generator=generator) for n in SIZES], 1)
        numbers = torch.randn(size, NUMBERS, generator=generator, dtype=torch.float64)
        score = (ids % 3).sum(1, keepdim=True) - 3 + numbers[:, :2]
        labels = (score + torch.randn(size, 2, generator=generator) > 0).to(dtype)
        return ids, numbers.to(dtype), labels

    return [batch(BATCH) for _ in range(STEPS)], batch(64)


def tower(*sizes: int) -> nn.Sequential:
    """Linear layers with a ReLU between two."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class QuotientRemainder(nn.Module):
    """Splits an id into quotient and remainder: two small tables in place of a large one."""

    def __init__(self, size: int, dim: int, buckets: int = 7) -> None:
        super().__init__()
        self.buckets = buckets
        self.quotient = nn.Embedding(-(-size // buckets), dim, sparse=True)
        self.remainder = nn.Embedding(buckets, dim, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.quotient(ids // self.buckets) * self.remainder(ids % self.buckets)


class MixedDimension(nn.Module):
    """A narrow table whose rows are projected to the common width."""

    def __init__(self, size: int, narrow: int, dim: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(size, narrow, mode="sum", sparse=True)
        self.wide = nn.Linear(narrow, dim, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wide(self.bag(ids[:, None]))


class DLRM(nn.Module):
    """Dot products of all pairs of rows, and of the vector of the numbers."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.bottom = tower(NUMBERS, 16, dim)
        self.tables = nn.ModuleList(
            [
                QuotientRemainder(SIZES[0], dim),
                MixedDimension(SIZES[1], 3, dim),
                nn.Embedding(SIZES[2], dim, sparse=True),
            ]
        )
        self.top = tower(dim + 6, 16, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *rows], 1)
        left, right = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        return self.top(torch.cat([dense, (vectors[:, left] * vectors[:, right]).sum(-1)], 1))


class DeepFM(nn.Module):
    """A linear part, pairwise products, and a deep part over the same rows."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, SIZES[0], SIZES[0] + SIZES[1]]))
        self.linear = nn.Embedding(sum(SIZES), 1, sparse=True)
        self.rows = nn.Embedding(sum(SIZES), dim, sparse=True)
        self.deep = tower(FIELDS * dim + NUMBERS, 16, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        places = ids + self.offsets
        rows = self.rows(places)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True) / 2
        deep = self.deep(torch.cat([rows.flatten(1), numbers], 1))
        return self.linear(places).sum(1) + pairs + deep


class MMOE(nn.Module):
    """Experts that two tasks mix with separate gates."""

    def __init__(self, dim: int = 5, experts: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, dim, sparse=True) for size in SIZES])
        width = FIELDS * dim + NUMBERS
        self.experts = nn.ModuleList([tower(width, 12, 8) for _ in range(experts)])
        self.gates = nn.ModuleList([nn.Linear(width, experts) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(2)])

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        seen = torch.cat([*rows, numbers], 1)
        experts = torch.stack([expert(seen) for expert in self.experts], 1)
        mixed = [(gate(seen).softmax(1)[..., None] * experts).sum(1) for gate in self.gates]
        return torch.cat([head(m) for head, m in zip(self.heads, mixed, strict=True)], 1)


MODELS: dict[str, Callable[[], nn.Module]] = {"dlrm": DLRM, "deepfm": DeepFM, "mmoe": MMOE}
RATES = {"dlrm": 0.1, "deepfm": 0.1, "mmoe": 0.3}
L2 = 1e-2


def build(name: str, dtype: torch.dtype) -> tuple[Any, torch.optim.Optimizer]:
    """A model with equal values in every process, and its optimizer."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    if name == "dlrm":
        return model, torch.optim.SGD(model.parameters(), lr=RATES[name])
    # with a small eps, a gradient of pure rounding error becomes a whole step
    return model, torch.optim.Adagrad(model.parameters(), lr=RATES[name], eps=0.1)


def whole_penalty(model: DeepFM, ids: Tensor) -> Tensor:
    """A penalty on all rows, as others write it; with servers, no process has all rows."""
    return L2 * (model.linear.weight.square().sum() + model.rows.weight.square().sum())


def penalty_on_rows(model: DeepFM, ids: Tensor) -> Tensor:
    """A penalty on the rows that the batch looks up."""
    places = ids + model.offsets
    rows = torch.cat([model.linear(places), model.rows(places)], -1)
    return L2 * rows.square().sum((1, 2)).mean()


def train(
    model: Any, optimizer: Any, batches: Iterable[Batch], penalty: Penalty | None = None
) -> None:
    """One pass over the batches."""
    model.train()
    for ids, numbers, labels in batches:
        loss = F.binary_cross_entropy_with_logits(model(ids, numbers), labels)
        if penalty is not None:
            loss = loss + penalty(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_and_keep_best(
    model: Any,
    optimizer: Any,
    batches: list[Batch],
    held_out: Batch,
    *,
    take: Callable[[Any], Any] = lambda model: copy.deepcopy(model.state_dict()),
    put: Callable[[Any, Any], Any] = lambda model, state: model.load_state_dict(state),
) -> int:
    """Three passes; then the best values on held-out data are loaded and trained further."""
    lowest, best, best_epoch = float("inf"), None, -1
    for epoch in range(3):
        train(model, optimizer, batches)
        model.eval()
        with torch.no_grad():
            ids, numbers, labels = held_out
            loss = float(F.binary_cross_entropy_with_logits(model(ids, numbers), labels))
        if loss < lowest:
            lowest, best, best_epoch = loss, take(model), epoch
    put(model, best)
    train(model, optimizer, batches[:2])
    return best_epoch
