# SPDX-License-Identifier: Apache-2.0
"""The fast callable of an operation returns what the operation returns."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fleetlight.static.coding.callables import _FUNCTIONS, _METHODS, callable_of

aten: Any = torch.ops.aten
X, Y = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.1, torch.eye(3) + 0.5
BATCH, IMAGE = torch.rand(2, 3, 3), torch.rand(2, 3, 4, 4)
RATE = torch.tensor(0.1, dtype=torch.float64)
ONE = torch.ones(())
WITH_DECAY = {"weight_decay": 0.1, "maximize": False}
ADAM = {"lr": RATE, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False, **WITH_DECAY}
SGD = {"lr": RATE, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((op, (X,), {}) for op in (aten.abs.default, aten.neg.default, aten.exp.default)),
    *((op, (X,), {}) for op in (aten.log.default, aten.sqrt.default, aten.rsqrt.default)),
    *((op, (X,), {}) for op in (aten.relu.default, aten.relu_.default, aten.tanh.default)),
    *((op, (X,), {}) for op in (aten.sigmoid.default, aten.t.default, aten.detach.default)),
    *((op, (X,), {}) for op in (aten.argmax.default, aten.mean.default, aten.sum.default)),
    *((op, (X, Y), {}) for op in (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor)),
    *((op, (X, Y), {}) for op in (aten.mm.default, aten.mul_.Tensor, aten.copy_.default)),
    *((op, (X, Y), {}) for op in (aten.eq.Tensor, aten.ne.Tensor, aten.gt.Tensor, aten.ge.Tensor)),
    *((op, (X, 0.5), {}) for op in (aten.lt.Scalar, aten.le.Scalar, aten.div_.Scalar)),
    *((op, (X, Y), {"alpha": 2}) for op in (aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor)),
    (aten.bmm.default, (BATCH, BATCH), {}),
    (aten.div.Tensor_mode, (X, 0.2), {"rounding_mode": "floor"}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Scalar, (0.9, X), {}),
    (aten.addmm.default, (X[0], X, Y), {"beta": 0.5}),
    (aten.baddbmm.default, (BATCH, BATCH, BATCH), {"alpha": 0.5}),
    (aten.sum.dim_IntList, (X, [0], True), {"dtype": torch.float64}),
    (aten.mean.dim, (X, [-1]), {}),
    (aten.amax.default, (X, [1], True), {}),
    (aten.argmax.default, (X, 1, True), {}),
    (aten.cumsum.default, (X, 0), {}),
    (aten._softmax.default, (X, 1, False), {}),
    (aten._softmax_backward_data.default, (X, Y, 1, torch.float32), {}),
    (aten._log_softmax.default, (X, 1, False), {}),
    (aten._log_softmax_backward_data.default, (X, Y, 1, torch.float32), {}),
    (aten.cat.default, ([X, Y], 1), {}),
    (aten.stack.default, ([X, Y], -1), {}),
    (aten.split_with_sizes.default, (X, [1, 2], 1), {}),
    (aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}),
    (aten.as_strided.default, (X, [2, 2], [1, 3], 1), {}),
    (aten.transpose.int, (BATCH, 0, -1), {}),
    (aten.permute.default, (BATCH, [2, 0, 1]), {}),
    (aten.squeeze.dim, (BATCH[:, :1], 1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.select.int, (X, 0, 1), {}),
    (aten.index_select.default, (X, 0, torch.tensor([2, 0])), {}),
    (aten.expand.default, (X[:1], [4, -1]), {}),
    (aten.view.default, (X, [9]), {}),
    (aten.view.dtype, (X, torch.int32), {}),
    (aten.where.self, (X > 0.5, X, Y), {}),
    (aten.embedding.default, (X, torch.tensor([[0, 2]]), -1, False, False), {}),
    (aten.zeros_like.default, (X,), {"dtype": torch.int8, "pin_memory": False}),
    (aten.ones_like.default, (X.t(),), {"memory_format": torch.preserve_format}),
    (aten.native_dropout.default, (X, 0.5, True), {}),
    (aten.native_layer_norm.default, (X, [3], X[0], X[1], 1e-5), {}),
    (aten.native_batch_norm.default, (X, X[0], X[1], X[0], X[1], True, 0.1, 1e-5), {}),
    (
        aten.convolution.default,
        (IMAGE, torch.rand(2, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        {},
    ),
    (aten._foreach_add_.Scalar, ([X, Y], 1), {}),
    (aten._foreach_mul.Tensor, ([X, Y], ONE), {}),
    (aten._foreach_addcdiv_.Scalar, ([X], [Y], [Y], 0.5), {}),
    (aten._fused_sgd_.tensor_lr, ([X], [Y], [Y]), {**SGD, **WITH_DECAY}),
    (aten._fused_adam_.tensor_lr, ([X], [Y], [Y], [Y], [], [ONE]), ADAM),
    (aten._fused_adamw_.tensor_lr, ([X], [Y], [Y], [Y], [], [ONE]), ADAM),
    (
        aten._fused_adagrad_.tensor_lr,
        ([X], [Y], [Y], [ONE]),
        {"lr": RATE, "lr_decay": 0.1, "eps": 1e-8, **WITH_DECAY},
    ),
    # values are undefined; only shape and type are compared
    (aten.empty_like.default, (torch.zeros(0, 3),), {"dtype": torch.float64}),
]


def fresh(value: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value
    )


#: all pytest workers must collect the same names, so values are not part of them
NAMES = [f"{operation}-{place}" for place, (operation, *_) in enumerate(CALLS)]


@pytest.mark.parametrize(("operation", "args", "kwargs"), CALLS, ids=NAMES)
def test_fast_callables_equal_their_operation(operation: Any, args: Any, kwargs: Any) -> None:
    ours, theirs = fresh((args, kwargs)), fresh((args, kwargs))
    torch.manual_seed(0)
    found = callable_of(operation)(*ours[0], **ours[1])
    torch.manual_seed(0)
    expected = operation(*theirs[0], **theirs[1])
    # some callables return the changed tensor where the operation returns None
    both = [(ours, theirs)] if expected is None else [(ours, theirs), (found, expected)]
    for one, other in both:
        leaves, others = (torch.utils._pytree.tree_leaves(value) for value in (one, other))
        assert len(leaves) == len(others)
        for leaf, twin in zip(leaves, others, strict=True):
            if isinstance(leaf, Tensor):
                torch.testing.assert_close(leaf, twin, rtol=0, atol=0, check_stride=True)


def test_every_fast_callable_is_compared() -> None:
    assert {operation.overloadpacket.__name__ for operation, *_ in CALLS} >= _FUNCTIONS | _METHODS
