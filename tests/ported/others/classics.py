# SPDX-License-Identifier: Apache-2.0
"""A language model, a GAN, a time series, and a module with its own training step.

The loops do not depend on Fleetlight: a `Port` distributes them, if anything does.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Values = dict[str, Tensor]


def _same(value: Any) -> Any:
    return value


def _whole(value: Tensor, dim: int = 0) -> Tensor:
    return value


@dataclasses.dataclass(frozen=True)
class Port:
    """The places where a distributed program differs."""

    model: Callable[[Any], Any] = _same
    optimizer: Callable[[Any], Any] = _same
    #: the worker's part of a batch, along a dimension
    part: Callable[..., Tensor] = _whole


# -- words: the decoder shares the encoder's weights; hidden states continue across batches

WORDS, WIDTH, COLUMNS, LENGTH, BPTT = 20, 8, 4, 43, 5
State = tuple[Tensor, Tensor]


class WordModel(nn.Module):
    """Two layers of LSTM between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, hidden: State) -> tuple[Tensor, State]:
        out, hidden = self.rnn(self.encoder(words), hidden)
        return F.log_softmax(self.decoder(out).view(-1, WORDS), 1), hidden

    def init_hidden(self, columns: int) -> State:
        zeros = self.encoder.weight.new_zeros(2, columns, WIDTH)
        return zeros, zeros


def repackage(hidden: Any) -> Any:
    """The same state, detached from its history."""
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(map(repackage, hidden))


def spans(text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Word sequences and their next words; the last sequence is short."""
    for start in range(0, len(text) - 1, BPTT):
        length = min(BPTT, len(text) - 1 - start)
        yield text[start : start + length], text[start + 1 : start + 1 + length].reshape(-1)


def validate_words(model: Any, text: Tensor) -> float:
    """The mean loss per word."""
    model.eval()
    total, hidden = 0.0, model.init_hidden(text.shape[1])
    with torch.no_grad():
        for words, targets in spans(text):
            output, hidden = model(words, hidden)
            total += len(words) * float(F.nll_loss(output, targets))
            hidden = repackage(hidden)
    return total / (len(text) - 1)


def language_model(dtype: torch.dtype, port: Port) -> Values:
    """Steps without an optimizer; the rate falls when validation does not improve."""
    torch.manual_seed(0)
    model = port.model(WordModel().to(dtype))
    draws = torch.Generator().manual_seed(1)
    text = torch.randint(0, WORDS, (LENGTH, COLUMNS), generator=draws).sort(0).values
    held_out, mine = text[::2], port.part(text, 1)
    rate, lowest = 2.0, float("inf")
    for _ in range(3):
        model.train()
        hidden = model.init_hidden(mine.shape[1])
        for words, targets in spans(mine):
            hidden = repackage(hidden)
            model.zero_grad()
            output, hidden = model(words, hidden)
            F.nll_loss(output, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-rate)
        loss = validate_words(model, held_out)
        rate, lowest = (rate, loss) if loss < lowest else (rate / 4, lowest)
    assert model.decoder.weight is model.encoder.weight
    return model.state_dict()


# -- images: a generator and a discriminator, each with an optimizer

NOISE, IMAGES = 6, 8


def first_values(module: nn.Module) -> None:
    """Narrow normal values; in batch norm around one."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator_net() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(4, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Flatten(0), nn.Sigmoid(),
    )  # fmt: skip


def adam(model: Any) -> torch.optim.Optimizer:
    # with a small eps, a gradient of pure rounding error becomes a whole step
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999), eps=1e-3)


def adversaries(dtype: torch.dtype, port: Port) -> Values:
    """The discriminator learns from real and detached fake images, then the generator from it."""
    torch.manual_seed(0)
    net_g = port.model(generator_net().apply(first_values).to(dtype))
    net_d = port.model(discriminator_net().apply(first_values).to(dtype))
    optimizer_d, optimizer_g = port.optimizer(adam(net_d)), port.optimizer(adam(net_g))
    criterion, draws = nn.BCELoss(), torch.Generator().manual_seed(1)
    for _ in range(4):
        numbers = torch.randn(IMAGES, 64 + NOISE, generator=draws, dtype=torch.float64).to(dtype)
        mine = port.part(numbers)
        real, noise = mine[:, :64].tanh().view(-1, 1, 8, 8), mine[:, 64:, None, None]
        label = torch.full((len(real),), 1.0, dtype=dtype)
        net_d.zero_grad()
        criterion(net_d(real), label).backward()
        fake = net_g(noise)
        criterion(net_d(fake.detach()), torch.zeros_like(label)).backward()
        optimizer_d.step()
        net_g.zero_grad()
        criterion(net_d(fake), label).backward()
        optimizer_g.step()
    return {
        **{f"g.{name}": value for name, value in net_g.state_dict().items()},
        **{f"d.{name}": value for name, value in net_d.state_dict().items()},
    }


# -- a series: steps of LBFGS, each with many evaluations of a closure


class Sequence(nn.Module):
    """Predicts the next value of each wave, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.linear = nn.LSTMCell(1, 6), nn.Linear(6, 1)

    def forward(self, waves: Tensor) -> Tensor:
        h = c = waves.new_zeros(len(waves), 6)
        outputs = []
        for value in waves.split(1, 1):
            h, c = self.cell(value, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, 1)


def series(dtype: torch.dtype, port: Port, line_search: str | None = None) -> Values:
    """Sine waves with random phases."""
    torch.manual_seed(0)
    seq = port.model(Sequence().to(dtype))
    starts = torch.randint(-20, 20, (6, 1), generator=torch.Generator().manual_seed(1))
    waves = port.part(torch.sin((torch.arange(12) + starts) / 3.0).to(dtype))
    criterion = nn.MSELoss()
    optimizer = port.optimizer(
        torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4, line_search_fn=line_search)
    )
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = criterion(seq(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            return loss

        optimizer.step(closure)
    return seq.state_dict()


# -- a module that defines its step, and a trainer that calls it


class AutoEncoder(nn.Module):
    """Its step calls submodules; the module itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 10))
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: Tensor) -> None:
        """Keeps a number for the trainer."""
        self.logged[name] = float(value.detach())

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Trainer:
    """Epochs, steps, validation, schedules; accumulates gradients on request."""

    def __init__(self, port: Port, max_epochs: int, accumulate: int = 1) -> None:
        self.port, self.max_epochs, self.accumulate = port, max_epochs, accumulate

    def fit(self, module: Any, batches: list[tuple[Tensor]], held_out: tuple[Tensor]) -> None:
        """Trains the module."""
        module = self.port.model(module)
        optimizers, schedulers = module.configure_optimizers()
        optimizer = self.port.optimizer(optimizers[0])
        for _ in range(self.max_epochs):
            module.train()
            for batch_idx, batch in enumerate(batches):
                loss = module.training_step(batch, batch_idx) / self.accumulate
                loss.backward()
                if (batch_idx + 1) % self.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            module.eval()
            with torch.no_grad():
                module.validation_step(held_out, 0)


def steps_of_its_own(dtype: torch.dtype, port: Port) -> Values:
    """An autoencoder, trained with gradients accumulated over two batches."""
    torch.manual_seed(0)
    module = AutoEncoder().to(dtype)
    draws = torch.Generator().manual_seed(1)
    records = torch.randn(5, 8, 10, generator=draws, dtype=torch.float64).to(dtype)
    batches = [(port.part(batch),) for batch in records[:4]]
    Trainer(port, max_epochs=2, accumulate=2).fit(module, batches, (records[4],))
    return {**module.state_dict(), "val_loss": torch.tensor(module.logged["val_loss"], dtype=dtype)}
