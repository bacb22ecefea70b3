# SPDX-License-Identifier: Apache-2.0
"""Publications in a bucket."""

from pathlib import Path

import numpy as np
import pytest
from tests.fleet.served.publishing.test_publisher import IDS, STEPS, build, train
from tests.served import ASYNC, Job, Member
from tests.store.s3 import FaultProxy, HalfObject

from fleetlight.errors import PublicationError, StoreRefusedError
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.publication.lease import LEASE, Lease
from fleetlight.publication.manifest import MANIFEST
from fleetlight.serve import Reader
from fleetlight.store import store_at


@pytest.mark.slow
def test_readers_follow_a_bucket(bucket: str, tmp_path: Path) -> None:
    def work(member: Member) -> None:
        made = member.context.publish(PublishOptions(bucket, every_s=1e6))
        assert made is not None
        made.publish_now()
        with Reader(bucket, cache=tmp_path, follow=False) as reader:
            for step in range(STEPS):
                train(member, step)
                member.communicator.flush()
                made.publish_now()
                assert reader.refresh()
                want = member.rows(np.arange(IDS))
                assert np.array_equal(reader.lookup("emb", np.arange(IDS)), want)
        # a second publisher watches the lease; the first one renews it
        store = store_at(bucket)
        assert store.head(LEASE) is not None

        def renewed(seconds: float) -> None:
            made._lease.renew()  # type: ignore[attr-defined]

        with pytest.raises(PublicationError, match="publishes here already"):
            Lease.acquire(store, "", pause=renewed)
        made.stop(publish=False)

    Job(build, ASYNC, workers=1, servers=2).run(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emb.server1", "dense"])
def test_a_file_that_arrives_half_is_not_published(bucket: str, s3: FaultProxy, name: str) -> None:
    def work(member: Member) -> None:
        made = member.context.publish(PublishOptions(bucket, every_s=1e6))
        assert made is not None
        s3.fail(HalfObject(), method="PUT", path=f"/{name}")
        with pytest.raises(
            PublicationError, match=rf"/{name}\..*wrote \d+ bytes, and worker 0 sees"
        ):
            made.publish_now()
        assert store_at(bucket).head(MANIFEST) is None
        made.publish_now()
        assert store_at(bucket).head(MANIFEST) is not None
        made.stop(publish=False)

    Job(build, ASYNC, workers=1, servers=2).run(work)


@pytest.mark.slow
def test_a_bucket_that_does_not_exist(bucket: str, tmp_path: Path) -> None:
    missing = bucket.replace("/run", "-missing/run")

    def work(member: Member) -> None:
        with pytest.raises(StoreRefusedError, match="-missing"):
            member.context.publish(PublishOptions(missing))

    Job(build, ASYNC, workers=1, servers=1).run(work)
    with pytest.raises(StoreRefusedError, match=r"-missing.*the bucket does not exist"):
        Reader(missing, cache=tmp_path, wait_s=300.0)
