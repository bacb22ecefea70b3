# SPDX-License-Identifier: Apache-2.0
"""`Compression`: which codec a model's gradients have, and which parameters it covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fleetlight.collective.codecs.codec import Codec, Span
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.errors import StrategyError, did_you_mean


class Compression:
    """A codec, what it is for, and what this worker keeps for it."""

    def __init__(
        self,
        codec: Codec,
        *,
        min_size: int = 1,
        exclude: Sequence[str] = (),
        error_feedback: bool = True,
    ) -> None:
        self.codec = codec
        self.error_feedback = error_feedback
        self.ledger = ErrorFeedback()
        self._min_size = min_size
        self._exclude = tuple(exclude)

    def begin(self) -> None:
        """Called where it takes effect, before the first gradient; may refuse."""

    def prepare(self) -> bool:
        """Called once before gradients travel; answers whether they do so coded."""
        return True

    def message_bytes(self, values: int) -> int:
        """How long the message of a parameter with so many values is, once nothing changes."""
        return self.codec.message_bytes([Span("", 0, 0, values)])

    def arrived(self, means: Mapping[str, Tensor]) -> None:
        """Called with the means of covered gradients of a backward, before anybody uses them."""
        self.hand_over(means)

    def hand_over(self, means: Mapping[str, Tensor]) -> None:
        """Make of some of them, in place, what the optimizer is to get."""

    def tell_at_end(self) -> None:
        """Called when a job ends well."""

    def covers(self, name: str, parameter: Tensor) -> bool:
        """False for what travels as it is: biases, norms, small parameters, excluded ones."""
        if parameter.dim() < 2 or parameter.numel() < self._min_size:
            return False
        return not any(_is_in(name, excluded) for excluded in self._exclude)

    def check(self, names: Iterable[str]) -> None:
        """Every name that is excluded must be that of a parameter, or of a module with some."""
        known = list(dict.fromkeys(names))
        modules = {name.rpartition(".")[0] for name in known}
        for excluded in self._exclude:
            if not any(_is_in(name, excluded) for name in known):
                raise StrategyError(
                    f"exclude: the model has no parameter or module {excluded!r}; "
                    f"{did_you_mean(excluded, [*known, *filter(None, sorted(modules))])}"
                )


def _is_in(name: str, excluded: str) -> bool:
    return name == excluded or name.startswith(f"{excluded}.")
