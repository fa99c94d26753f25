"""What a state server says of itself to its registry: a value, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resp_server.cluster.topology import NODE_ID, Topology, TopologyError
from resp_server.serving.appliers import Visible
from state_backend.model.errors import KeyGroupsError, SparkisError
from state_backend.model.key_groups import NONE, KeyGroups

# How long a server that is to end may hand over what it has: less than a keeper waits before it kills.
DRAIN_S_MAX = 4.0


class ReportError(SparkisError):
    """A report that says nothing, or something that cannot be."""


@dataclass(frozen=True)
class Report:
    """Where clients find a server, what it can answer, which topology it shows, and the epochs that it shows.

    has_room: its store can be written. zone: servers of one may be lost together; empty: those of its host. driver: who
    may end it; empty: nobody, it was started by hand.
    """

    id: str
    host: str
    port: int
    wants_nothing: bool = False
    has_room: bool = True
    shown: int = -1
    held: KeyGroups = NONE
    jobs: Mapping[str, Visible] = field(default_factory=dict)
    zone: str = ""
    driver: str = ""

    def to_json(self) -> str:
        """Return what `parse` reads."""
        return json.dumps(
            {
                "id": self.id,
                "host": self.host,
                "port": self.port,
                "wants_nothing": self.wants_nothing,
                "has_room": self.has_room,
                "shown": self.shown,
                "held": str(self.held),
                "jobs": {name: seen._asdict() for name, seen in self.jobs.items()},
                "zone": self.zone,
                "driver": self.driver,
            }
        )

    @classmethod
    def parse(cls, text: str | bytes) -> Report:
        """Read a report; ReportError, naming what is wrong."""
        try:
            given = json.loads(text)
            member_id, host, port = given["id"], given["host"], given["port"]
            if not NODE_ID.fullmatch(member_id):
                raise ReportError(f"the report's id {member_id!r:.80} is not 40 hex digits in lower case")
            Topology.of_json({"version": 0, "nodes": [{"id": member_id, "host": host, "port": port}]})
            jobs = {str(name): _visible(seen) for name, seen in given["jobs"].items()}
            held = KeyGroups.parse(given["held"])
            shown, zone, driver = int(given["shown"]), str(given.get("zone", "")), str(given.get("driver", ""))
            wants_nothing, has_room = bool(given["wants_nothing"]), bool(given.get("has_room", True))
            return cls(member_id, host, port, wants_nothing, has_room, shown, held, jobs, zone, driver)
        except (TopologyError, KeyGroupsError) as error:
            raise ReportError(f"a report that cannot be: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"not a report of a state server: {error!r}") from None


def _visible(seen: Any) -> Visible:
    return Visible(str(seen["generation"]), int(seen["term"]), int(seen["epoch"]))
