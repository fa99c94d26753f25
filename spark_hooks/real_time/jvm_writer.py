"""The JVM writer of a session: its jar on the class path, and its place in a query. The only user of `_jwrite`.

Python's `foreach` is no way: it holds rows until the batch ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.real_time.servers import Servers
from state_backend.model.errors import DescriptorError

# `scripts/writer_jar.py` compiles it from the Java files that are beside it.
JAR = Path(__file__).with_name("sparkis-writer.jar")
CLASS = "io.github.sparkis.SparkisWriter"

# The applications whose executors load the jar. Spark warns if a jar is added again.
_applications: set[str] = set()


class JvmWriter:
    """A `SparkisWriter` in the driver's JVM. Spark sends a copy of it to the executors with each batch.

    Args:
        schema: The schema of the rows, as Spark's JSON.
    """

    def __init__(self, spark: SparkSession, job: str, schema: str, servers: Servers) -> None:
        context: Any = spark.sparkContext
        arguments = context._gateway.new_array(context._jvm.Object, 3)
        for index, each in enumerate((job, schema, ",".join(servers.urls))):
            arguments[index] = each
        self._writer = _class(spark).getConstructors()[0].newInstance(arguments)
        if (tls := servers.tls) is not None:
            self._writer.withTls(*(path or "" for path in (tls.cert, tls.key, tls.ca)))

    def set_on(self, writer: DataStreamWriter) -> None:
        """Make this the sink of a query that is not started yet."""
        classic: Any = writer
        classic._jwrite.foreach(self._writer)

    def set_servers(self, servers: Servers) -> None:
        """Send the rows of the next batches to these servers."""
        self._writer.setServers(",".join(servers.urls))


def _class(spark: SparkSession) -> Any:
    """Return the class, loaded by the driver; its executors can load it from now on. DescriptorError."""
    if not JAR.exists():
        raise DescriptorError(
            f"freshness='record' needs {JAR.name}, which this installation of sparkis lacks: install a wheel, or run "
            f"`make setup` in the checkout, which says why it cannot be compiled"
        )
    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    try:
        return jvm.Thread.currentThread().getContextClassLoader().loadClass(CLASS)  # spark.jars has it
    except Py4JError:
        pass
    try:
        if spark.sparkContext.applicationId not in _applications:
            session.sessionState().resourceLoader().addJar(str(JAR))
            _applications.add(spark.sparkContext.applicationId)
        return session.sharedState().jarClassLoader().loadClass(CLASS)
    except Py4JError as error:
        raise DescriptorError(
            f"this Spark takes no jar while it runs ({str(error).partition(chr(10))[0]}): start it with the setting "
            f"spark.jars={JAR}"
        ) from None
