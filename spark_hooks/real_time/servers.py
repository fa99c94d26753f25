"""The state servers of a log as the writer on the executors needs them: their URLs, and the files of TLS."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from resp_server.net.addresses import address_of
from resp_server.net.client import Client, ErrorReplyError
from resp_server.net.tls import TlsFiles, client_context
from spark_hooks.serving import endpoints
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.endpoints import ServedEndpoint
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from state_backend.model.errors import DescriptorError

# Servers that this driver has not started: `redis[s]://[USER:PASSWORD@]HOST:PORT`, with commas between them.
SERVERS_SETTING = "spark.sparkis.stateServers"
# Redis' reply of a server that is alone.
NO_CLUSTER = "This instance has cluster support disabled"
# The form of a key that Java reads.
PKCS8 = "-----BEGIN PRIVATE KEY-----"


class Servers(NamedTuple):
    """All state servers of a log.

    Args:
        urls: `redis[s]://[USER:PASSWORD@]HOST:PORT` of each.
        tls: The files of connections with TLS, on each executor's machine; None: certificates that Java trusts.
    """

    urls: list[str]
    tls: TlsFiles | None = None


def servers_of(spark: SparkSession, log: str) -> Servers:
    """Return the servers of a log, those that SERVERS_SETTING names or else those of this driver.

    With placement `executors` none may have started yet, or all may have ended; they are asked for again later.

    Raises:
        DescriptorError: There is none to send rows to, or a login or a file is wrong.
        ClientError: A server does not answer.
    """
    if given := spark.conf.get(SERVERS_SETTING, None):
        return _servers_elsewhere(given.replace(",", " ").split(), endpoints.tls_files_of(spark))
    found = [each for each in endpoints.of_log(log) if isinstance(each, ServedEndpoint)]
    if not found:
        raise DescriptorError(
            f"freshness='record' sends rows to the servers of the log, and this driver has started none for {log}: "
            f"call sparkis.serve(spark) before the query starts, or set {SERVERS_SETTING} to the URL of a server"
        )
    endpoint = found[-1]
    if isinstance(endpoint, ExecutorsEndpoint):
        plan = endpoint.plan
        members = sorted(str(member["address"]) for member in endpoint.members())
        password = plan.server_password or plan.password
        urls = [endpoints.url_of(*_parts(member), password, plan.tls) for member in members]
        return Servers(urls, _checked(plan.tls))
    if isinstance(endpoint, DetachedEndpoint) and endpoint.has_proxy:
        raise DescriptorError(
            "freshness='record' sends rows to a state server, and with upstream= the server of this driver is behind a "
            "proxy: use placement='executors', or serve without upstream="
        )
    url = urlsplit(endpoint.url)
    host = url.hostname or "127.0.0.1"
    if host == "127.0.0.1" and not str(spark.sparkContext.master).startswith("local"):
        host = (spark.conf.get("spark.driver.host", None) or host).strip("[]")
    login, at, _ = url.netloc.rpartition("@")
    urls = [f"{url.scheme}://{login}{at}{address_of(host, endpoint.port)}"]
    _check_login(endpoint.url, endpoint.tls)
    return Servers(urls, _checked(endpoint.tls))


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_login(url: str, tls: TlsFiles | None) -> None:
    """Raise DescriptorError if a server needs a user, whose password only its ACL file has."""
    parts = urlsplit(url)
    context = None if tls is None else client_context(tls)
    password = None if parts.password is None else unquote(parts.password)
    try:
        with Client(parts.hostname or "", parts.port or 0, password=password, tls=context) as client:
            client.call("PING")
    except ErrorReplyError as error:
        url = f"{parts.scheme}://USER:PASSWORD@{address_of(parts.hostname or '', parts.port or 0)}"
        raise DescriptorError(f"freshness='record': {error}; set {SERVERS_SETTING}={url}") from None


def _servers_elsewhere(urls: list[str], tls: TlsFiles | None) -> Servers:
    """Return the servers at some URLs; if one is a node of a cluster, all of its nodes."""
    found: dict[str, None] = {}
    for url in urls:
        try:
            with Client.from_url(url, tls=tls if url.startswith("rediss:") else None) as client:
                nodes = _nodes(client)
        except ErrorReplyError as error:
            raise DescriptorError(f"{SERVERS_SETTING}: {error}") from None
        parts = urlsplit(url)
        login, at, address = parts.netloc.rpartition("@")
        found |= dict.fromkeys(f"{parts.scheme}://{login}{at}{each}" for each in nodes or [address])
    return Servers(list(found), _checked(tls))


def _nodes(client: Client) -> list[str]:
    """Return the addresses of all nodes of a server's cluster; empty if it is alone."""
    try:
        slots = client.call("CLUSTER", "SLOTS")
    except ErrorReplyError as error:
        if NO_CLUSTER in str(error):
            return []
        raise
    return sorted({address_of(node[0], node[1]) for _, _, *nodes in slots for node in nodes})


def _checked(tls: TlsFiles | None) -> TlsFiles | None:
    """Return files that this machine has as well; TlsError, or DescriptorError for a key that Java does not read."""
    if tls is None:
        return None
    client_context(tls)  # raises the error of a file that cannot be used
    if tls.key is not None and tls.ca is not None and PKCS8 not in Path(tls.key).read_text():
        raise DescriptorError(
            f"freshness='record' needs the key {tls.key} in the form PKCS#8, which Java reads: "
            f"openssl pkey -in {tls.key} -out NEW"
        )
    return tls
