# SPDX-License-Identifier: Apache-2.0
"""`ErrorFeedback`: what a sender keeps of gradients that its codec has dropped, by parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice

_Slices = tuple[ParameterSlice, ...]


class ErrorFeedback:
    """Values of several kinds, each as long as the parameters.

    They have the layout of buckets, so that the values of a bucket are one tensor. Buckets may
    change: values of former buckets move into the new ones.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, _Slices], Tensor] = {}
        #: the bucket that has the values of a parameter
        self._buckets: dict[tuple[str, str], _Slices] = {}
        #: values that were loaded, or were in a former bucket, by kind and parameter
        self._loose: dict[tuple[str, str], Tensor] = {}

    def of(self, kind: str, slices: _Slices) -> Tensor:
        """The values of a bucket, zeros at first; callers change them in place."""
        found = self._kept.get((kind, slices))
        return self._new_bucket(kind, slices) if found is None else found

    def has(self, kind: str) -> bool:
        """True where values of this kind are kept, or were loaded."""
        return any(found == kind for found, _ in (*self._kept, *self._loose))

    def state(self) -> dict[str, Tensor]:
        """Copies, by kind and parameter."""
        loose = {f"{kind}/{name}": tensor.clone() for (kind, name), tensor in self._loose.items()}
        for kind, slices in self._kept:
            for part, values in zip(slices, self._split(kind, slices), strict=True):
                loose[f"{kind}/{part.name}"] = values.clone()
        return loose

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; values that it lacks are zero."""
        self._kept.clear()
        self._buckets.clear()
        self._loose.clear()
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            self._loose[kind, name] = tensor.reshape(-1).clone()

    def _new_bucket(self, kind: str, slices: _Slices) -> Tensor:
        for part in slices:
            self._loosen(kind, part.name)
        # in main memory and of the codecs' type, whatever torch's defaults are
        kept = torch.zeros(sum(p.size for p in slices), dtype=torch.float32, device="cpu")
        self._kept[kind, slices] = kept
        self._buckets.update({(kind, part.name): slices for part in slices})
        for part, values in zip(slices, self._split(kind, slices), strict=True):
            found = self._loose.pop((kind, part.name), None)
            if found is not None:
                values.copy_(found)
        return kept

    def _loosen(self, kind: str, name: str) -> None:
        """Dissolve the former bucket of a parameter."""
        slices = self._buckets.get((kind, name))
        if slices is None:
            return
        for part, values in zip(slices, self._split(kind, slices), strict=True):
            self._loose[kind, part.name] = values.clone()
            del self._buckets[kind, part.name]
        del self._kept[kind, slices]

    def _split(self, kind: str, slices: _Slices) -> tuple[Tensor, ...]:
        return torch.split(self._kept[kind, slices], [part.size for part in slices])
