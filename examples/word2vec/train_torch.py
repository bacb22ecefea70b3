# SPDX-License-Identifier: Apache-2.0
"""Word vectors by skip-gram with negative sampling: plain PyTorch, one process."""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fleetlight.data import Corpus, SkipGram


class WordVectors(nn.Module):
    """Two vectors for each word: one as the centre of a window, one as its context."""

    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.centre = nn.Embedding(words, dim, sparse=True)
        self.output = nn.Embedding(words, dim, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.output.weight)

    def forward(self, centre: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        """The loss of a batch: words of the window should fit the centre, others should not."""
        words = torch.cat([context.unsqueeze(1), negatives], dim=1)
        fits = (self.output(words) * self.centre(centre).unsqueeze(1)).sum(2)
        is_real = torch.zeros_like(fits)
        is_real[:, 0] = 1
        losses = F.binary_cross_entropy_with_logits(fits, is_real, reduction="none")
        return losses.sum(1).mean()


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    args = arguments()
    corpus = Corpus(args.data or "data/text", min_count=args.min_count, stand_in=not args.data)
    torch.manual_seed(0)
    model = WordVectors(len(corpus.vocabulary), args.dim)
    # the gradient is a mean: multiply the rate of word2vec by the pairs of a batch
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * args.batch)
    train(model, optimizer, corpus, args)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, args: argparse.Namespace
) -> None:
    say(f"data: {corpus}")
    pairs = SkipGram(corpus, window=args.window, negatives=args.negatives)
    loader = DataLoader(pairs, args.batch, collate_fn=pairs.collate)
    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        pairs.set_epoch(epoch)
        for step, (centre, context, negatives) in enumerate(loader):
            loss = model(centre, context, negatives)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(centre)
            if step % args.show_every == 0:
                say(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if args.steps and step + 1 == args.steps:
                break
    speed = seen / (time.perf_counter() - start)
    say(f"last loss {loss.item():.4f}, training speed {speed:.0f} pairs/s")
    show_nearest(model, corpus, args.ask.split(","))


@torch.no_grad()
def show_nearest(model: nn.Module, corpus: Corpus, words: list[str]) -> None:
    """Print the words with the largest cosine similarity."""
    vectors = F.normalize(model.centre(torch.arange(len(corpus.vocabulary))), dim=1)
    for word in words:
        if word in corpus.vocabulary:
            similarity = vectors @ vectors[corpus.vocabulary[word]]
            nearest = similarity.topk(6).indices.tolist()[1:]
            say(f"{word}: {', '.join(corpus.vocabulary.words[i] for i in nearest)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="text files, or a pattern (default: generated)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--negatives", type=int, default=5)
    parser.add_argument("--min_count", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of each epoch at most (0: all)")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.025, help="of one pair, as in word2vec")
    parser.add_argument("--ask", default="topic0_0,topic7_3", metavar="WORD,WORD")
    parser.add_argument("--show_every", type=int, default=500, metavar="STEPS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
