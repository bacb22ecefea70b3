# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on lists of tensors in one call: the `torch._foreach_*` family.

Why: a loop over the parameters of a model costs up to ten times as much for small ones. torch
documents these functions but gives them private names. A loop would do the same. `unscale_` and
`update_scale_` are what `torch.amp.GradScaler` itself calls, so results are equal to its own.
"""

import torch

add_ = torch._foreach_add_
clamp_max = torch._foreach_clamp_max
clamp_min = torch._foreach_clamp_min
copy_ = torch._foreach_copy_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sub = torch._foreach_sub
sub_ = torch._foreach_sub_
zero_ = torch._foreach_zero_
#: (gradients, found, inverse): multiply gradients by `inverse`; `found` becomes 1 at an infinity
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
#: (scale, growth tracker, found, growth, backoff, interval): GradScaler.update for tensors
update_scale_ = torch._amp_update_scale_
