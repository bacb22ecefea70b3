# SPDX-License-Identifier: Apache-2.0
"""`ErrorFeedback`: what a sender keeps of gradients that it has not sent, found by parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice

_Parts = tuple[ParameterSlice, ...]


class ErrorFeedback:
    """Several kinds of it, each as long as the parameters are.

    It lies as buckets do, so that a bucket's is one tensor. Buckets may change: what is found in
    old ones is carried over.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, _Parts], Tensor] = {}
        #: the bucket in which the values of a parameter are
        self._homes: dict[tuple[str, str], _Parts] = {}
        #: what was loaded, or lay in a bucket that is no more, by kind and parameter
        self._loose: dict[tuple[str, str], Tensor] = {}

    def of(self, kind: str, parts: _Parts) -> Tensor:
        """What is kept of a bucket with these parts, zeros at first; changed in place."""
        found = self._kept.get((kind, parts))
        return self._taken_in(kind, parts) if found is None else found

    def has(self, kind: str) -> bool:
        """Whether anything of that kind is kept, or was loaded."""
        return any(found == kind for found, _ in (*self._kept, *self._loose))

    def state(self) -> dict[str, Tensor]:
        """Copies, by kind and parameter."""
        loose = {f"{kind}/{name}": tensor.clone() for (kind, name), tensor in self._loose.items()}
        for kind, parts in self._kept:
            for part, values in zip(parts, self._split(kind, parts), strict=True):
                loose[f"{kind}/{part.name}"] = values.clone()
        return loose

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` has answered; what is not in it is zero."""
        self._kept.clear()
        self._homes.clear()
        self._loose.clear()
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            self._loose[kind, name] = tensor.reshape(-1).clone()

    def _taken_in(self, kind: str, parts: _Parts) -> Tensor:
        for part in parts:
            self._loosen(kind, part.name)
        # in main memory and of the codecs' type, whatever torch's defaults are
        kept = torch.zeros(sum(p.size for p in parts), dtype=torch.float32, device="cpu")
        self._kept[kind, parts] = kept
        self._homes.update({(kind, part.name): parts for part in parts})
        for part, values in zip(parts, self._split(kind, parts), strict=True):
            found = self._loose.pop((kind, part.name), None)
            if found is not None:
                values.copy_(found)
        return kept

    def _loosen(self, kind: str, name: str) -> None:
        """Take a bucket apart in which the parameter was."""
        parts = self._homes.get((kind, name))
        if parts is None:
            return
        for part, values in zip(parts, self._split(kind, parts), strict=True):
            self._loose[kind, part.name] = values.clone()
            del self._homes[kind, part.name]
        del self._kept[kind, parts]

    def _split(self, kind: str, parts: _Parts) -> tuple[Tensor, ...]:
        return torch.split(self._kept[kind, parts], [part.size for part in parts])
