# SPDX-License-Identifier: Apache-2.0
"""A schedule of a job that forms: members join in any order, and get their indices."""

from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.world import World

from fleetlight.errors import MembershipError
from fleetlight.roles import members


class Formed:
    """Members of several hosts, whose node ids are numbers, names, or nothing."""

    def __init__(self, world: World) -> None:
        self.world, chance = world, world.chance
        self.count = chance.randrange(1, 7)
        ids = chance.choice(("none", "numbers", "names", "some"))
        numbers = list(range(self.count))
        chance.shuffle(numbers)
        self.hellos = [self._hello(n, ids, numbers[n]) for n in range(self.count)]
        #: one of them claims the index of another
        self.twice = ids == "numbers" and self.count > 1 and chance.random() < 0.2
        if self.twice:
            self.hellos[0] = self._hello(0, ids, numbers[1])
        #: one of them runs another version
        self.differs = self.count > 1 and chance.random() < 0.1

    def _hello(self, n: int, ids: str, number: int) -> members.MemberHello:
        chance = self.world.chance
        known = {"none": None, "numbers": str(number), "names": f"pod-{number}"}
        return members.MemberHello(
            kind="worker",
            index=None,
            address=f"10.0.0.{chance.randrange(3)}",
            hostname="a",
            pid=n,
            node_id=known.get(ids, chance.choice((None, str(number)))),
        )

    def run(self) -> None:
        """Run it; raises a violation."""
        arrived = [members.decode(members.encode(hello)) for hello in self.hellos]
        self.world.chance.shuffle(arrived)
        for hello in arrived:
            self.world.tell("comes", hello)
        try:
            given = members.assign_indices(arrived)
        except MembershipError as error:
            if not self.twice:
                raise broken("cause", str(error)) from error
            return
        if self.twice:
            raise broken("index", f"two members claim one, and got {given}")
        self._look(arrived, given)

    def _look(self, arrived: list[members.MemberHello], given: list[int]) -> None:
        if sorted(given) != list(range(self.count)):
            raise broken("index", f"{given}, of {self.count}")
        for hello, index in zip(arrived, given, strict=True):
            if (
                hello.node_id is not None
                and hello.node_id.isdigit()
                and int(hello.node_id) != index
            ):
                raise broken("index", f"{hello} got {index}")
        present = dict(zip(given, arrived, strict=True))
        lost = self.world.chance.randrange(self.count)
        here = {index: hello for index, hello in present.items() if index != lost}
        if members.absent(self.count, here) != [lost]:
            raise broken("index", f"{lost} is missing, told was {members.absent(self.count, here)}")
        if f"worker {lost}" not in members.missing_text(self.count, here, (), 1.0):
            raise broken("index", f"worker {lost} is missing, and not named")
        members.check_same_versions(present)
