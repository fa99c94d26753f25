"""docs/real-time.md, run as it is printed, with a real broker: its orders are readable minutes before their commit."""

from __future__ import annotations

import sys
from pathlib import Path

from compat.conformance.servers import free_port
from tests.kafka.broker import Broker
from tests.kafka.page import Page, kept

PAGE = Page("real-time.md")


def test_page_has_shown_output(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    with PAGE.running(kafka, port, tmp_path, Path(sys.executable), kept(PAGE.export)):
        PAGE.produce(kafka)
        PAGE.wait_for_reads(port, 1)
        PAGE.check_typed_commands(port)
        assert not list((tmp_path / "checkpoints" / "shop").glob("commits/[0-9]*"))
