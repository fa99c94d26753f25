"""A state server's report to its registry: a value, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resp_server.cluster.topology import NODE_ID, Topology, TopologyError
from resp_server.serving.applier_process import Visible
from state_backend.model.errors import SlotSetError, SparkisError
from state_backend.model.slot_set import NONE, SlotSet

# How long an ending server may hand over its slots: less than its supervisor waits before it kills the process.
DRAIN_S_MAX = 4.0


class ReportError(SparkisError):
    """A report that is not JSON, or has an invalid field."""


@dataclass(frozen=True)
class Report:
    """A server's address for clients, the slots that it can answer, and the topology and epochs that it serves.

    Args:
        is_draining: Other servers should take over.
        topology_version: -1 for none yet.
        has_room: Its store can be written.
        zone: Servers of one zone may fail together; empty: the host is the zone.
        driver: The driver that may end it; empty: none, it was started by hand.
        logs: The identity of each log that it serves, by its root; empty: the log has none; None: it was not read yet.
            An older server reports no logs.
    """

    id: str
    host: str
    port: int
    is_draining: bool = False
    has_room: bool = True
    topology_version: int = -1
    owned_slots: SlotSet = NONE
    jobs: Mapping[str, Visible] = field(default_factory=dict)
    zone: str = ""
    driver: str = ""
    logs: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return f"{self.host}:{self.port}"

    def to_json(self) -> str:
        """Return the JSON that `parse` reads."""
        return json.dumps(
            {
                "id": self.id,
                "host": self.host,
                "port": self.port,
                "is_draining": self.is_draining,
                "has_room": self.has_room,
                "topology_version": self.topology_version,
                "owned_slots": str(self.owned_slots),
                "jobs": {name: seen._asdict() for name, seen in self.jobs.items()},
                "zone": self.zone,
                "driver": self.driver,
                "logs": dict(self.logs),
            }
        )

    @classmethod
    def parse(cls, text: str | bytes) -> Report:
        """Read a report; ReportError."""
        try:
            fields = json.loads(text)
            member_id, host, port = fields["id"], fields["host"], fields["port"]
            if not NODE_ID.fullmatch(member_id):
                raise ReportError(f"the report's id {member_id!r:.80} is not 40 hex digits in lower case")
            Topology.of_json({"version": 0, "nodes": [{"id": member_id, "host": host, "port": port}]})
            jobs = {str(name): _visible(seen) for name, seen in fields["jobs"].items()}
            owned_slots = SlotSet.parse(fields["owned_slots"])
            topology_version = int(fields["topology_version"])
            zone, driver = str(fields.get("zone", "")), str(fields.get("driver", ""))
            is_draining, has_room = bool(fields["is_draining"]), bool(fields.get("has_room", True))
            logs = {str(root): None if of is None else str(of) for root, of in fields.get("logs", {}).items()}
            return cls(
                member_id, host, port, is_draining, has_room, topology_version, owned_slots, jobs, zone, driver, logs
            )
        except (TopologyError, SlotSetError) as error:
            raise ReportError(f"the report is invalid: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"not a report of a state server: {error!r}") from None


def _visible(seen: Any) -> Visible:
    digest = seen.get("digest")
    return Visible(
        str(seen["generation"]),
        int(seen["term"]),
        int(seen["epoch"]),
        None if digest is None else int(digest),
        str(seen.get("log", "")),
    )
