# SPDX-License-Identifier: Apache-2.0
"""Residuals belong to parameters, whichever bucket they are in."""

import pytest
import torch

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.error_feedback import ErrorFeedback

A, B, C = ParameterSlice("a", 2), ParameterSlice("b", 3), ParameterSlice("c", 1)


def filled() -> ErrorFeedback:
    feedback = ErrorFeedback()
    feedback.of("owed", (A, B)).copy_(torch.arange(5.0))
    feedback.of("owed", (C,)).fill_(9)
    return feedback


def test_a_residual_starts_at_zero_and_changes_in_place() -> None:
    feedback = ErrorFeedback()
    assert feedback.of("owed", (A, B)).tolist() == [0] * 5
    feedback.of("owed", (A, B))[1] = 7
    assert feedback.of("owed", (A, B)).tolist() == [0, 7, 0, 0, 0]


def test_kinds_are_separate() -> None:
    feedback = filled()
    feedback.of("owed again", (A, B)).fill_(5)
    assert feedback.of("velocity", (A, B)).tolist() == [0] * 5
    assert feedback.of("owed", (A, B)).tolist() == [0, 1, 2, 3, 4]


def test_has_reports_the_stored_kinds() -> None:
    feedback = filled()
    assert feedback.has("owed")
    assert not feedback.has("velocity")
    feedback.load({"velocity/a": torch.ones(2)})
    assert not feedback.has("owed")
    assert feedback.has("velocity")


def test_a_residual_moves_with_its_parameter_to_other_buckets() -> None:
    feedback = filled()
    assert feedback.of("owed", (B, C, A)).tolist() == [2, 3, 4, 9, 0, 1]
    # a parameter outside the present buckets keeps its residual
    assert feedback.of("owed", (B,)).tolist() == [2, 3, 4]
    assert feedback.of("owed", (A,)).tolist() == [0, 1]
    assert feedback.of("owed", (A, B)).tolist() == [0, 1, 2, 3, 4]
    assert feedback.of("owed", (C,)).tolist() == [9]


def test_a_new_parameter_starts_at_zero_in_an_old_bucket() -> None:
    assert filled().of("owed", (A, ParameterSlice("new", 2), B)).tolist() == [0, 1, 0, 0, 2, 3, 4]


def test_state_is_keyed_by_kind_and_parameter() -> None:
    feedback = filled()
    feedback.of("velocity", (ParameterSlice("moved/a", 1),)).fill_(3)
    state = feedback.state()
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        "owed/a": [0, 1],
        "owed/b": [2, 3, 4],
        "owed/c": [9],
        "velocity/moved/a": [3],
    }
    feedback.of("owed", (C,)).fill_(1)
    assert state["owed/c"].tolist() == [9]


@pytest.mark.parametrize("again", [False, True], ids=["at_once", "behind_another_save"])
def test_a_loaded_residual_is_found_in_any_bucket(again: bool) -> None:
    state, feedback = filled().state(), ErrorFeedback()
    feedback.of("owed", (A, C)).fill_(5)
    feedback.of("velocity", (C,)).fill_(5)
    feedback.load(state)
    if again:
        feedback.load(feedback.state())
    state["owed/a"].fill_(8)
    assert feedback.of("owed", (C, A)).tolist() == [9, 0, 1]
    assert feedback.of("velocity", (C,)).tolist() == [0]
    assert feedback.state()["owed/b"].tolist() == [2, 3, 4]


def test_residuals_are_float32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert ErrorFeedback().of("owed", (A,)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
