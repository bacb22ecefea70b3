# SPDX-License-Identifier: Apache-2.0
"""Models of many kinds, from a batch of 3 x 4 numbers to three classes, in double precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from fleetlight import static


def batch(number: int, size: int | None = None) -> dict[str, Tensor]:
    """Batches of several sizes."""
    torch.manual_seed(50 + number)
    size = size or (6, 3, 9, 5)[number % 4]
    return {"x": torch.randn(size, 3, 4).double(), "y": torch.randint(0, 3, (size,))}


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """The loss of the first output."""
    if isinstance(output, dict):
        output = output["scores"]
    if isinstance(output, tuple):
        output = output[0]
    return nn.functional.cross_entropy(output, labels)


class Headed(nn.Module):
    """A linear layer after a function of the batch and a module."""

    def __init__(self, body: nn.Module, function: Callable[..., Tensor], width: int = 4) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._function(self.body, x))


def flat(body: nn.Module, x: Tensor) -> Tensor:
    """Applies the body to the first four numbers of each record."""
    return body(x[:, 0])


def recurrent(kind: Any, **options: Any) -> nn.Module:
    """The last output of a recurrent net."""
    width = options.pop("width", 5)
    return Headed(kind(4, 5, batch_first=True, **options), lambda body, x: body(x)[0][:, -1], width)


def attention(drop: float) -> nn.Module:
    net = nn.MultiheadAttention(4, 2, dropout=drop, batch_first=True)
    return Headed(net, lambda body, x: body(x, x, x, need_weights=False)[0].mean(1))


def encoder(drop: float) -> nn.Module:
    net = nn.TransformerEncoderLayer(4, 2, 8, drop, batch_first=True)
    return Headed(net, lambda body, x: body(x).mean(1))


def norms() -> nn.Module:
    layers = (
        *(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)),
        *(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)),
        nn.LayerNorm(4),
    )
    return Headed(nn.Sequential(*layers), lambda body, x: body(x).mean(2))


def pictures() -> nn.Module:
    """With a norm over two dimensions and a dropout of whole channels."""
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.4))
    return Headed(nn.Sequential(*layers), lambda body, x: body(x[:, None]).mean((2, 3)))


class InPlace(nn.Module):
    """Changes its intermediate values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.drop, self.relu = nn.Dropout(0.4, inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, 0])
        hidden.add_(1).mul_(2)
        hidden = self.relu(self.drop(hidden + 1))
        hidden = hidden * 2
        hidden.unsqueeze_(0).squeeze_(0)
        return self.last(hidden)


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(x[:, 0]).tanh()))


class Repeats(nn.Module):
    """Calls its layers twice, a norm among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.layers(x[:, 0])))


class _Squared(torch.autograd.Function):
    """A wrong derivative on purpose, so that a test sees which one is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x


class OwnDerivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return _Squared.apply(self.layer(x[:, 0]))


class ReplacesBuffers(nn.Module):
    """Replaces one buffer and changes another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x[:, 0])
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        self.total.mul_(0.5).add_(out.detach().mean(0))
        return out - self.mean + self.total


class Several(nn.Module):
    """Returns more than one tensor."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x[:, 0])
        return (out, out * 2) if self.kind is tuple else {"scores": out, "double": out * 2}


class Draws(nn.Module):
    """Draws noise of a fixed shape, and of one that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4, dtype=torch.float64) + torch.rand(x.shape[0], 1, dtype=torch.float64)
        return self.layer(x[:, 0] + noise)


def checkpointed(body: nn.Module, x: Tensor) -> Tensor:
    """Backward recomputes the activations."""
    return checkpoint(body, x[:, 0], use_reentrant=False)


def recomputed() -> nn.Module:
    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3))
    return Headed(nn.Sequential(*layers), checkpointed, 5)


def attended() -> nn.Module:
    def attend(body: nn.Module, x: Tensor) -> Tensor:
        q = body(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0].mean(1)

    return Headed(nn.Linear(4, 4), attend)


#: models that a program supports fully
KINDS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: encoder(0.1),
    "lstm": lambda: recurrent(nn.LSTM),
    "lstm, layers": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.3, bias=False),
    "lstm, both ways": lambda: recurrent(nn.LSTM, bidirectional=True, proj_size=2, width=4),
    "gru": lambda: recurrent(nn.GRU),
    "gru, layers": lambda: recurrent(
        nn.GRU, num_layers=2, dropout=0.2, bidirectional=True, width=10
    ),
    "rnn": lambda: recurrent(nn.RNN, num_layers=2, dropout=0.2),
    "attention": lambda: attention(0.0),
    "attention, dropout": lambda: attention(0.3),
    "kernel of attention": attended,
    "norms": norms,
    "pictures": pictures,
    "rrelu": lambda: Headed(nn.Sequential(nn.Linear(4, 4), nn.RReLU()), flat),
    "alpha dropout": lambda: Headed(nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.3)), flat),
    "in place": InPlace,
    "tied": Tied,
    "repeats": Repeats,
    "own derivative": OwnDerivative,
    "weight norm": lambda: Headed(weight_norm(nn.Linear(4, 4)), flat),
    "checkpoint": recomputed,
    "tuple": lambda: Several(tuple),
    "dict": lambda: Several(dict),
}


def of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def captured(model: nn.Module, lr: float = 0.1) -> static.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return static.capture(model, loss_of, optimizer, batch(0))
