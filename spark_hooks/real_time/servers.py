"""The addresses of the state servers of a log, and their password, as the writer on the executors needs them."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from resp_server.net.addresses import address_of
from spark_hooks.serving import endpoints
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.endpoints import ServedEndpoint
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from state_backend.model.errors import DescriptorError


class Servers(NamedTuple):
    """The addresses of all state servers, `HOST:PORT`, and their password or an empty text."""

    addresses: list[str]
    password: str


def servers_of(spark: SparkSession, log: str) -> Servers:
    """Return the servers that this driver has started for a log; DescriptorError if there is none to send rows to.

    With placement `executors` none may have started yet, or all may have ended; they are asked for again later.
    """
    found = [each for each in endpoints.of_log(log) if isinstance(each, ServedEndpoint)]
    if not found:
        raise DescriptorError(
            f"freshness='record' sends rows to the servers of the log, and this driver has started none for {log}: "
            f"call sparkis.serve(spark) before the query starts"
        )
    endpoint = found[-1]
    if endpoint.url.startswith("rediss:"):
        raise DescriptorError(
            "freshness='record' has no TLS yet, and the servers of the log accept nothing else: serve without tls=, or "
            "use freshness='commit'"
        )
    if isinstance(endpoint, ExecutorsEndpoint):
        members = sorted(str(member["address"]) for member in endpoint.members())
        return Servers(members, endpoint.plan.server_password or endpoint.plan.password or "")
    if isinstance(endpoint, DetachedEndpoint) and endpoint.has_proxy:
        raise DescriptorError(
            "freshness='record' sends rows to a state server, and with upstream= the server of this driver is behind a "
            "proxy: use placement='executors', or serve without upstream="
        )
    url = urlsplit(endpoint.url)
    host = url.hostname or "127.0.0.1"
    if host == "127.0.0.1" and not str(spark.sparkContext.master).startswith("local"):
        host = (spark.conf.get("spark.driver.host", None) or host).strip("[]")
    return Servers([address_of(host, endpoint.port)], unquote(url.password or ""))
