# SPDX-License-Identifier: Apache-2.0
"""`Compression`: the codec of a model's gradients, and which parameters it covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fleetlight.collective.codecs.codec import Codec, Span
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.errors import StrategyError, did_you_mean


class Compression:
    """A codec, the parameters it covers, and what this worker keeps for it."""

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
        self.residuals = ErrorFeedback()
        self._min_size = min_size
        self._exclude = tuple(exclude)

    def begin(self) -> None:
        """Called before the first gradient where compression takes effect; may refuse."""

    def prepare(self) -> bool:
        """Called before gradients travel; returns whether they travel coded."""
        return True

    def message_bytes(self, values: int) -> int:
        """The final length of the message of a parameter with this many values."""
        return self.codec.message_bytes([Span("", 0, 0, values)])

    def receive(self, means: Mapping[str, Tensor]) -> None:
        """Called with the means of a backward's covered gradients, before any use of them."""
        self.correct(means)

    def correct(self, means: Mapping[str, Tensor]) -> None:
        """Turn means, in place, into what the optimizer takes for gradients."""

    def warn_at_end(self) -> None:
        """Called when a job ends without an error."""

    def covers(self, name: str, parameter: Tensor) -> bool:
        """False for biases, norms, small and excluded parameters, which travel as they are."""
        if parameter.dim() < 2 or parameter.numel() < self._min_size:
            return False
        return not any(_is_in(name, excluded) for excluded in self._exclude)

    def check(self, names: Iterable[str]) -> None:
        """Raise where an excluded name is that of no parameter and of no module with some."""
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
