# SPDX-License-Identifier: Apache-2.0
"""Seeds: of tables and records, and of what each worker draws."""

from __future__ import annotations

from fleetlight.strategy.effects import always
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class


def _worker_seeds(strategy: SeedsFeature, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker draws what its script has seeded"
    if strategy.worker_seeds == "same":
        return True, "the workers draw what their scripts have seeded: dropout masks may be equal"
    return True, "once training begins, each worker draws its own: dropout masks differ"


@settings_class
class SeedsFeature(Feature):
    """Seeds of the job and of its workers."""

    seed: int = setting(
        0,
        "seed of tables and of the order of records",
        effect=always(
            "order of records and first values of rows; torch's own generators are not touched"
        ),
        minimum=0,
    )
    worker_seeds: str = setting(
        "distinct",
        "whether the workers draw different random numbers in training, as for dropout",
        effect=_worker_seeds,
        choices=("distinct", "same"),
    )
