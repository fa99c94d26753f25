"""sparkis: read the live state of a Spark Structured Streaming job with any Redis client.

This package has all public names. Each is imported when it is first used. Names that use Spark need PySpark; the others
work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sparkis.packages import check_packages

check_packages()

if TYPE_CHECKING:
    from resp_server.registry.announcer import Announcer
    from resp_server.settings.groups import Driver, Executors, Limits, Upstream
    from resp_server.settings.tls import Tls
    from spark_hooks.attach.processor import QueryableProcessor, queryable_processor
    from spark_hooks.attach.start import attach
    from spark_hooks.publish.failures import QueryFailedError
    from spark_hooks.publish.geo import geo_score
    from spark_hooks.publish.sink import publish
    from spark_hooks.publish.table import publish_table
    from spark_hooks.queryable import queryable
    from spark_hooks.serving.endpoints import ServedEndpoint
    from spark_hooks.serving.serve import serve
    from state_backend.apply.replay import read_snapshot
    from state_backend.attach.attachment import Attachment
    from state_backend.attach.states import AttachedState
    from state_backend.codec.row_encoding import RowError
    from state_backend.history.table import read_table
    from state_backend.log.log_writer import LogWriter
    from state_backend.model.descriptor import By, Encoding, Kind, Late, Reduce, StateDescriptor
    from state_backend.model.errors import (
        ChangeError,
        DescriptorError,
        FencedWriterError,
        JobInUseError,
        LogError,
        LogUnavailableError,
        SparkisError,
    )
    from state_backend.model.records import Change, Op
    from state_backend.store.store import Snapshot

__version__: str = import_module("state_backend").VERSION
__all__ = [
    "Announcer",
    "AttachedState",
    "Attachment",
    "By",
    "Change",
    "ChangeError",
    "DescriptorError",
    "Driver",
    "Encoding",
    "Executors",
    "FencedWriterError",
    "JobInUseError",
    "Kind",
    "Late",
    "Limits",
    "LogError",
    "LogUnavailableError",
    "LogWriter",
    "Op",
    "QueryFailedError",
    "QueryableProcessor",
    "Reduce",
    "RowError",
    "ServedEndpoint",
    "Snapshot",
    "SparkisError",
    "StateDescriptor",
    "Tls",
    "Upstream",
    "attach",
    "geo_score",
    "publish",
    "publish_table",
    "queryable",
    "queryable_processor",
    "read_snapshot",
    "read_table",
    "serve",
]

_MODULES = {
    "resp_server.registry.announcer": ("Announcer",),
    "resp_server.settings.groups": ("Driver", "Executors", "Limits", "Upstream"),
    "resp_server.settings.tls": ("Tls",),
    "state_backend.attach.attachment": ("Attachment",),
    "state_backend.attach.states": ("AttachedState",),
    "spark_hooks.attach.start": ("attach",),
    "state_backend.codec.row_encoding": ("RowError",),
    "spark_hooks.publish.failures": ("QueryFailedError",),
    "spark_hooks.serving.endpoints": ("ServedEndpoint",),
    "spark_hooks.publish.geo": ("geo_score",),
    "spark_hooks.attach.processor": ("QueryableProcessor", "queryable_processor"),
    "spark_hooks.serving.serve": ("serve",),
    "spark_hooks.publish.sink": ("publish",),
    "spark_hooks.queryable": ("queryable",),
    "spark_hooks.publish.table": ("publish_table",),
    "state_backend.model.descriptor": ("By", "Encoding", "Kind", "Late", "Reduce", "StateDescriptor"),
    "state_backend.model.errors": (
        "ChangeError",
        "DescriptorError",
        "FencedWriterError",
        "JobInUseError",
        "LogError",
        "LogUnavailableError",
        "SparkisError",
    ),
    "state_backend.log.log_writer": ("LogWriter",),
    "state_backend.model.records": ("Change", "Op"),
    "state_backend.apply.replay": ("read_snapshot",),
    "state_backend.history.table": ("read_table",),
    "state_backend.store.store": ("Snapshot",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# Hidden from type checkers, which read the imports above: with `__getattr__`, a misspelt name would pass.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'sparkis' has no attribute {name!r}")
        try:
            found = getattr(import_module(_MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("pyspark."):
                version = import_module("pyspark").__version__
                raise ImportError(f"sparkis.{name} needs Spark 4.0 or later, and this is Spark {version}") from None
            missing = (error.name or "").partition(".")[0]
            if missing not in ("pyspark", "py4j", "pandas"):
                raise
            missing = missing.replace("py4j", "pyspark")  # pyspark installs py4j
            raise ImportError(f"sparkis.{name} needs {missing}: pip install 'sparkis[spark]'") from None
        if name in ("QueryableProcessor", "queryable_processor"):
            import_module("spark_hooks.attach.processor").add_pickle_callback(_listen_for_queries)
        globals()[name] = found
        return found

    def _listen_for_queries():
        # Imported when a driver pickles a processor, because Python workers import processors and do not need it.
        import_module("spark_hooks.attach.automatic").listen_for_queries()

    def __dir__():
        return [*__all__, "__version__"]
