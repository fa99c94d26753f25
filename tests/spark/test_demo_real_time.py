"""`sparkis demo --real-time`, from its command line."""

from __future__ import annotations

import pytest
import redis

from compat.waiting import WAIT_S_MAX, eventually
from tests.spark.processes import sparkis
from tests.spark.test_demo import read

KEY = "carriers:flights:UA"


@pytest.mark.slow
def test_newest_count_is_ahead_of_committed_one_and_ends_as_pandas_says() -> None:
    flights = int((read("flights.csv.zip")["carrier"] == "UA").sum())
    with sparkis("demo", "--real-time", "--once", "--speed", 20, "--port", 0) as demo:
        url = demo.wait_for(r"state +(redis://\S+) ")[1]
        with (
            redis.Redis.from_url(url, decode_responses=True) as newest,
            redis.Redis.from_url(url, decode_responses=True, single_connection_client=True) as committed,
        ):
            committed.execute_command("STATE", "FRESHNESS", "COMMITTED")

            def is_ahead() -> bool:
                try:
                    return int(newest.get(KEY) or 0) > int(committed.get(KEY) or 0)
                except redis.BusyLoadingError:  # the server opens the job
                    return False

            eventually(is_ahead, bool)
        demo.wait_for(f"all {flights:,} flights of UA are readable")
        assert demo.process.wait(WAIT_S_MAX) == 0
