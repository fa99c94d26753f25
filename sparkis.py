"""sparkis: read the live state of a Spark Structured Streaming job with any Redis client.

`serve`, `queryable`, `publish`, `attach` and `queryable_processor` need PySpark; all else works without it.
"""

from typing import TYPE_CHECKING, Any

from state_backend.descriptor import Encoding, Kind, StateDescriptor
from state_backend.errors import SparkisError
from state_backend.log_writer import LogWriter
from state_backend.records import Change, Op
from state_backend.replay import read_snapshot

if TYPE_CHECKING:
    from spark_hooks.attach import AttachedState, Attachment, attach
    from spark_hooks.endpoints import ServedEndpoint
    from spark_hooks.geo import geo_score
    from spark_hooks.processor import queryable_processor
    from spark_hooks.serve import serve
    from spark_hooks.sink import publish, queryable
    from spark_hooks.table import publish_table

__version__ = "0.1.0"
__all__ = [
    "AttachedState",
    "Attachment",
    "Change",
    "Encoding",
    "Kind",
    "LogWriter",
    "Op",
    "ServedEndpoint",
    "SparkisError",
    "StateDescriptor",
    "attach",
    "geo_score",
    "publish",
    "publish_table",
    "queryable",
    "queryable_processor",
    "read_snapshot",
    "serve",
]

_NEED_SPARK = {
    "serve": "serve",
    "ServedEndpoint": "endpoints",
    "geo_score": "geo",
    "queryable": "sink",
    "publish": "sink",
    "publish_table": "table",
    "attach": "attach",
    "queryable_processor": "processor",
    "AttachedState": "attach",
    "Attachment": "attach",
}


def __getattr__(name: str) -> Any:
    """Import what needs PySpark when it is first asked for, so that hosts without Spark can import the rest."""
    if name not in _NEED_SPARK:
        raise AttributeError(f"module 'sparkis' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"spark_hooks.{_NEED_SPARK[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("pyspark", "py4j", "pandas"):
            raise
        missing = missing.replace("py4j", "pyspark")  # which brings it
        raise ImportError(f"sparkis.{name} needs {missing}: pip install 'sparkis[spark]'") from None
