"""The commands: one module per Redis group, one function per command, and the table that is built from them.

A function reads the keyspace and returns plain Python values. What a command is (arity, flags, key positions) is in
`command`; how a reply becomes bytes is in `protocol`.
"""

from __future__ import annotations

from functools import cache

from resp_server.command.handler import handlers_in, worker_queries_in
from resp_server.command.spec import redis_facts
from resp_server.command.table import CommandTable
from resp_server.commands import (
    acl,
    bitmap,
    client,
    cluster,
    command,
    config,
    connection,
    dump,
    fresh,
    function,
    generic,
    geo,
    hash,
    info,
    job_query,
    latency,
    lcs,
    list,
    memory,
    object,
    other_types,
    overlay,
    pubsub,
    server,
    set,
    slowlog,
    sort,
    sorted_set,
    sorted_set_algebra,
    state,
    string,
    tracking,
    transactions,
)

GROUPS = (
    connection,
    acl,
    client,
    tracking,
    cluster,
    server,
    config,
    info,
    job_query,
    slowlog,
    latency,
    memory,
    command,
    generic,
    string,
    bitmap,
    lcs,
    hash,
    list,
    set,
    sorted_set,
    sorted_set_algebra,
    geo,
    other_types,
    function,
    sort,
    dump,
    object,
    state,
    fresh,
    overlay,
    transactions,
    pubsub,
)


@cache
def command_table() -> CommandTable:
    """Return the table of all commands, which the servers of a process share; DeclarationError if a row is bad.

    To build it takes a hundred times as long as the rest of a server.
    """
    return CommandTable(
        redis_facts(),
        [each for group in GROUPS for each in handlers_in(group)],
        [each for group in GROUPS for each in worker_queries_in(group)],
    )
