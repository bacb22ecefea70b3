# SPDX-License-Identifier: Apache-2.0
"""Records for training: sharding over workers, readers of well-known data sets, made-up ones.

The public names are in `fleetlight.data.public`. The first use of one imports them all, so a job
that reads its records in another way does not wait for the readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.data.public import *  # noqa: F403


if not TYPE_CHECKING:  # mypy must see the names above only

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'fleetlight.data' has no attribute {name!r}")
        import fleetlight.data.public as public

        if name == "__all__":
            return public.__all__
        if name not in public.__all__:
            raise AttributeError(
                f"module 'fleetlight.data' has no attribute {name!r};"
                f" expected one of {', '.join(public.__all__)}"
            )
        value = globals()[name] = getattr(public, name)
        return value


def __dir__() -> list[str]:
    import fleetlight.data.public as public

    return sorted({*globals(), *public.__all__})
