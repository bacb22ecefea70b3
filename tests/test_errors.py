# SPDX-License-Identifier: Apache-2.0
"""Errors: suggestions for misspelled arguments, and which errors are permanent."""

from __future__ import annotations

import pytest

from fleetlight import errors


@errors.names_arguments
def trained(model: str, *, batch_size: int = 1) -> str:
    """A function that users call."""
    return f"{model} {batch_size}"


def test_line_lists_the_first_names() -> None:
    assert errors.first_names(["a", "b", "c"], 3) == "a, b, c"
    assert errors.first_names(["a", "b", "c", "d", "e"], 3) == "a, b, c and 2 more"


def test_misspelled_argument_gets_a_suggestion() -> None:
    assert trained("m", batch_size=2) == "m 2"
    assert trained.__doc__ == "A function that users call."
    with pytest.raises(
        TypeError, match=r"trained\(\) got .* 'bach_size'; did you mean 'batch_size'"
    ):
        trained("m", bach_size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        trained(batch_size=2)  # type: ignore[call-arg]


class Layer:
    """A class that users instantiate or derive from."""

    @errors.names_arguments
    def __init__(self, dim: int) -> None:
        self.dim = dim


class Derived(Layer):
    """Errors name the class that users call, and not its base."""


def test_misspelled_argument_of_a_class_names_the_class() -> None:
    with pytest.raises(TypeError, match=r"^Derived\(\) got .* 'dimm'; did you mean 'dim'\?"):
        Derived(dimm=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kind",
    [
        errors.ConfigError,
        errors.StrategyError,
        errors.PlanError,
        errors.CorruptCheckpointError,
        errors.JournalError,
        errors.DataError,
    ],
)
def test_errors_that_need_a_correction_are_permanent(kind: type[Exception]) -> None:
    assert errors.is_lasting(kind("x"))


@pytest.mark.parametrize(
    "kind",
    [
        errors.AddressError,
        errors.ComebackError,
        errors.DivergedError,
        errors.LostCheckpointError,
        errors.PeerLostError,
        errors.DeadlineError,
        errors.GradientError,
        RuntimeError,
        ValueError,
        OSError,
        KeyboardInterrupt,
    ],
)
def test_errors_that_a_restart_may_cure_are_not_permanent(kind: type[BaseException]) -> None:
    assert not errors.is_lasting(kind("x"))
