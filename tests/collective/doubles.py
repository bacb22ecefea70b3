# SPDX-License-Identifier: Apache-2.0
"""A route on which no reduction ends."""

from collections.abc import Mapping
from typing import Any

from torch.futures import Future

from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp


class Slow:
    """Its reductions never end."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        return Future()

    def finish(self) -> None:
        pass

    def stamps(self) -> Mapping[int, GradientStamp]:
        return {}

    def close(self) -> None:
        pass
