"""The costs of one row, key, change and request, as measured, with the page that has each measurement.

`sparkis size` multiplies these numbers, and so does docs/scale.md; a test compares them with the pages. All times are
processor times on one machine (2 cores, Linux, Python 3.11).
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE, PERFORMANCE, CHANGE_LOG = "docs/scale.md", "docs/performance.md", "docs/change-log.md"


@dataclass(frozen=True)
class Cost:
    """A measured cost.

    Args:
        words: A text of the page that has the number, without its thousands' separators and line breaks.
    """

    value: float
    unit: str
    meaning: str
    page: str
    words: str

    @property
    def source(self) -> str:
        """Return where the number comes from."""
        return f"{self.page}: “{self.words}”"


# The key and the value of the measurements: 24 and 17 bytes.
MEASURED_KEY_BYTES, MEASURED_VALUE_BYTES = 24, 17

LOG_BYTES_OF_A_CHANGE = Cost(
    31,
    "bytes",
    "a change in the log, beside its key and value",
    SCALE,
    "a change in the log (a key of 24 bytes, a value of 17; 81 bytes with 30 and 20) | 72 bytes",
)
WRITING = Cost(
    2.7,
    "µs",
    "an executor's core for a row, from Spark into a committed epoch",
    SCALE,
    "2.7 µs of executors' cores (a batch of a million rows: 1.35 s on two)",
)
SHUFFLE = Cost(
    1.0,
    "µs",
    "more of it for a row of a state with order_by or reduce, or of several states",
    SCALE,
    "the shuffle of states with `order_by` or `reduce`, and of several states | 1 µs",
)
APPLYING = Cost(
    0.5,
    "µs",
    "an applier's core for a change of a value, or of a map of several columns, without expiry",
    SCALE,
    "0.2 to 0.5 µs of processor time in epochs of 100,000 and more",
)
APPLYING_IN_PYTHON = Cost(
    5.0,
    "µs",
    "an applier's core for a change of any other state",
    SCALE,
    "the same, all other changes, in Python | some 5 µs",
)
READING_FOREIGN = Cost(
    0.04, "µs", "an applier's core for a change of another server's slots", SCALE, "another server's slots | 0.04 µs"
)
_SERVER_ROW = "a GET at a server: alone / in pipelines of 16 / of 100 | 5.8 to 6.1 / 0.5 to 0.6 / 0.2 to 0.3 µs"
_PROXY_ROW = "a GET through a proxy, at the proxy's core | 8.9 / 0.6 / 0.2 µs"
# By the number of requests in a pipeline.
GET_AT_A_SERVER = {
    pipeline: Cost(value, "µs", f"a server's core for a GET, in pipelines of {pipeline}", SCALE, _SERVER_ROW)
    for pipeline, value in ((1, 5.8), (16, 0.6), (100, 0.3))
}
GET_AT_A_PROXY = {
    pipeline: Cost(value, "µs", f"a proxy's core for a GET, in pipelines of {pipeline}", SCALE, _PROXY_ROW)
    for pipeline, value in ((1, 8.9), (16, 0.6), (100, 0.2))
}
# 24 + 17 + 35 bytes are the 76 of a record (CONTRIBUTING.md, Budgets); pages are seven tenths full.
RECORD_BYTES_OF_A_KEY = Cost(
    35, "bytes", "a key's record in the store, beside its key and value", SCALE, "a key in the store's file | 108 bytes"
)
PAGES_FILLED = Cost(
    0.7, "", "how full the pages of a store are, as in any B+ tree of keys in random order", SCALE, "| 108 bytes"
)
SUPERVISOR = Cost(7e6, "bytes", "the memory of a server's supervisor", SCALE, "| 7 + 34 + 66 MB")
SERVER = Cost(34e6, "bytes", "the memory of a server, without its store", SCALE, "| 7 + 34 + 66 MB")
APPLIER = Cost(
    66e6, "bytes", "the memory of an applier, one for each job, beside an epoch's writes", SCALE, "| 7 + 34 + 66 MB"
)
REGISTRY = Cost(30e6, "bytes", "the memory of a registry", SCALE, "a registry | 30 MB")
FREE_PAGES = Cost(
    1.0,
    "",
    "the most free pages of a store while keys change, as a part of its data",
    PERFORMANCE,
    "74 MB of free pages beside 111 MB of used ones",
)
OBJECT_READS = Cost(
    5500,
    "reads/s",
    "what an object store serves below one prefix",
    SCALE,
    "serves some 5,500 reads a second below one prefix",
)
FILE_SERVER = Cost(1e9, "bytes/s", "what a file server delivers", SCALE, "a file server perhaps a gigabyte a second")
SNAPSHOT_AFTER = Cost(
    2.0,
    "",
    "a snapshot is written when the changes since the newest one have so many times its size",
    CHANGE_LOG,
    "when the changes since the newest one are twice its size",
)
SNAPSHOT_EPOCHS = Cost(1000, "epochs", "or after so many epochs", CHANGE_LOG, "or after 1,000 epochs")
RETENTIONS_KEPT = Cost(
    1.5, "", "how many times the retention a log has changes of", CHANGE_LOG, "at most an hour and a half"
)
SNAPSHOTS_KEPT = Cost(5, "snapshots", "the most snapshots of a log", CHANGE_LOG, "at most five snapshots")

ALL = (
    LOG_BYTES_OF_A_CHANGE,
    WRITING,
    SHUFFLE,
    APPLYING,
    APPLYING_IN_PYTHON,
    READING_FOREIGN,
    *GET_AT_A_SERVER.values(),
    *GET_AT_A_PROXY.values(),
    RECORD_BYTES_OF_A_KEY,
    PAGES_FILLED,
    SUPERVISOR,
    SERVER,
    APPLIER,
    REGISTRY,
    FREE_PAGES,
    OBJECT_READS,
    FILE_SERVER,
    SNAPSHOT_AFTER,
    SNAPSHOT_EPOCHS,
    RETENTIONS_KEPT,
    SNAPSHOTS_KEPT,
)
