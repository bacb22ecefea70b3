# SPDX-License-Identifier: Apache-2.0
"""A route that leads nowhere, for tests to say what happens to what is started on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.futures import Future

from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp


class Slow:
    """Nothing that is started comes to an end."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        return Future()

    def finish(self) -> None:
        pass

    def stamps(self) -> Mapping[int, GradientStamp]:
        return {}

    def close(self) -> None:
        pass
