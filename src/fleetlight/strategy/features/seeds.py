# SPDX-License-Identifier: Apache-2.0
"""Seeds of tables and records, and of each worker's random numbers."""

from __future__ import annotations

from fleetlight.strategy.effects import always
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class


def _worker_seeds(strategy: SeedsFeature, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "the job has one worker, which uses the script's seeds"
    if strategy.worker_seeds == "same":
        return True, "workers use the seeds of their scripts: dropout masks may be equal"
    return True, "when training begins, each worker gets its own seed: dropout masks differ"


@settings_class
class SeedsFeature(Feature):
    """Seeds of the job and of its workers."""

    seed: int = setting(
        0,
        "seed of tables and of the order of records",
        effect=always(
            "order of records and initial values of rows; torch's generators are not affected"
        ),
        minimum=0,
    )
    worker_seeds: str = setting(
        "distinct",
        "whether workers use different random numbers in training, as for dropout",
        effect=_worker_seeds,
        choices=("distinct", "same"),
    )
