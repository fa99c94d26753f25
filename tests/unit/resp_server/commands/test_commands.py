"""What commands answer: a line in, a reply out. tests/differential compares the replies with those of a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resp_server.commands.command import docs_row, info_row
from resp_server.protocol.replies import encode
from resp_server.push.tracking_table import PREFIX_BYTES_MAX, PREFIX_OVERHEAD_BYTES
from state_backend import VERSION
from state_backend.model.slots import field_hash_position
from state_backend.store.keyspace import Keyspace

NOW_MS = 1_700_000_000_000
# What STATE LAG and STATE JOBS say of the job's epochs.
LAG = {
    b"applied": 4,
    b"committed": 6,
    b"lag_epochs": 2,
    b"lag_ms": 1500,
    b"committed_at": b"2023-11-14T22:13:19.000Z",
    b"age_ms": 1000,
    b"epochs_per_minute": 2,
    b"changes_per_minute": 30,
    b"stale": 0,
    b"incomplete": 0,
    b"skipped_rows": 0,
    b"source_lag_records": None,
    b"source_lag_at": None,
    b"source_lag_age_ms": None,
    b"source_partitions": [],
    b"source_partition_lags": [],
    b"record_delay_p50_ms": None,
    b"record_delay_p99_ms": None,
    b"fresh_keys": 0,
    b"fresh_batch": None,
    b"fresh_age_ms": None,
    b"fresh_incomplete": 0,
    b"held_back_epoch": None,
    b"held_back_since": None,
    b"as_of": None,
    b"error": b"",
}
SYNTAX = b"-ERR syntax error\r\n"
NOT_INTEGER = b"-ERR value is not an integer or out of range\r\n"
WRONGTYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
NO_PASSWORD = (
    b"-ERR AUTH <password> called without any password configured for the default user. Are you sure your "
    b"configuration is correct?\r\n"
)

LPOS_RANK = (
    b"-ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or use negative to start "
    b"from the end of the list\r\n"
)

REPLIES = [
    # connection
    ("PING", b"+PONG\r\n"),
    ("PING hi", b"$2\r\nhi\r\n"),
    ("PING a b", b"-ERR wrong number of arguments for 'ping' command\r\n"),
    ("ECHO hi", b"$2\r\nhi\r\n"),
    ("SELECT 15", b"+OK\r\n"),
    ("SELECT 16", b"-ERR DB index is out of range\r\n"),
    ("SELECT x", NOT_INTEGER),
    ("AUTH a b c", SYNTAX),
    ("AUTH default x", b"+OK\r\n"),
    ("AUTH me x", b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"),
    ("AUTH x", NO_PASSWORD),
    ("HELLO 4", b"-NOPROTO unsupported protocol version\r\n"),
    ("HELLO x", b"-ERR Protocol version is not an integer or out of range\r\n"),
    ("HELLO 3 FOO", b"-ERR Syntax error in HELLO option 'FOO'\r\n"),
    ("HELLO 3 SETNAME", b"-ERR Syntax error in HELLO option 'SETNAME'\r\n"),
    # client
    ("CLIENT ID", b":7\r\n"),
    ("CLIENT GETNAME", b"$-1\r\n"),
    ("CLIENT SETNAME me", b"+OK\r\n"),
    ("CLIENT SETNAME \u00e9", b"-ERR Client names cannot contain spaces, newlines or special characters.\r\n"),
    ("CLIENT SETINFO LIB-NAME redis-py", b"+OK\r\n"),
    ("CLIENT SETINFO LIB-FOO x", b"-ERR Unrecognized option 'LIB-FOO'\r\n"),
    ("CLIENT NO-EVICT maybe", SYNTAX),
    ("CLIENT NO-TOUCH on", b"+OK\r\n"),
    ("CLIENT REPLY maybe", SYNTAX),
    ("CLIENT LIST ID 1 x", b"-ERR Invalid client ID\r\n"),
    ("CLIENT LIST TYPE x", b"-ERR Unknown client type 'x'\r\n"),
    ("CLIENT LIST FOO", SYNTAX),
    ("CLIENT LIST ID 99", b"$0\r\n\r\n"),
    ("CLIENT MAINT_NOTIFICATIONS ON", b"-ERR unknown subcommand 'MAINT_NOTIFICATIONS'. Try CLIENT HELP.\r\n"),
    ("CLIENT PAUSE 1", b"+OK\r\n"),
    ("CLIENT TRACKING ON", b"+OK\r\n"),
    # server
    ("DBSIZE", b":27\r\n"),
    ("TIME", b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"),
    ("ROLE", b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"),
    ("CONFIG GET databases", b"*2\r\n$9\r\ndatabases\r\n$2\r\n16\r\n"),
    ("CONFIG GET DATABASES", b"*2\r\n$9\r\nDATABASES\r\n$2\r\n16\r\n"),
    ("CONFIG GET maxmemory-*", b"*2\r\n$16\r\nmaxmemory-policy\r\n$10\r\nnoeviction\r\n"),
    ("CONFIG GET nope", b"*0\r\n"),
    ("INFO nope", b"$0\r\n\r\n"),
    ("MODULE LIST", b"*0\r\n"),
    ("SCRIPT EXISTS a b", b"*2\r\n:0\r\n:0\r\n"),
    ("CLUSTER INFO", b"-ERR This instance has cluster support disabled\r\n"),
    ("READONLY", b"-ERR This instance has cluster support disabled\r\n"),
    ("EVALSHA abc 0", b"-NOSCRIPT No matching script. Please use EVAL.\r\n"),
    ("XREAD COUNT 1 STREAMS a 0", b"-ERR command 'xread' is not served by sparkis\r\n"),
    # generic
    ("EXISTS job:temp:1 job:stats:a nope job:temp:1", b":3\r\n"),
    ("TOUCH job:temp:1 nope", b":1\r\n"),
    ("TYPE job:temp:1", b"+string\r\n"),
    ("TYPE job:visits:/", b"+hash\r\n"),
    ("TYPE nope", b"+none\r\n"),
    ("TTL nope", b":-2\r\n"),
    ("TTL job:temp:1", b":-1\r\n"),
    ("TTL job:temp:soon", b":3\r\n"),
    ("PTTL job:temp:soon", b":2500\r\n"),
    ("EXPIRETIME job:temp:soon", b":1700000003\r\n"),
    ("PEXPIRETIME job:temp:soon", b":1700000002500\r\n"),
    ("TTL job:temp:gone", b":-2\r\n"),
    ("KEYS job:stats:*", b"*1\r\n$11\r\njob:stats:a\r\n"),
    ("KEYS nope", b"*0\r\n"),
    ("SCAN x", b"-ERR invalid cursor\r\n"),
    ("SCAN 0 COUNT 0", SYNTAX),
    ("SCAN 0 COUNT x", NOT_INTEGER),
    ("SCAN 0 MATCH", SYNTAX),
    ("SCAN 0 NOVALUES", b"-ERR NOVALUES option can only be used in HSCAN\r\n"),
    ("SCAN 18446744073709551615", b"*2\r\n$1\r\n0\r\n*0\r\n"),
    ("SCAN 0 TYPE Hash COUNT 100 MATCH *stats*", b"*2\r\n$1\r\n0\r\n*1\r\n$11\r\njob:stats:a\r\n"),
    ("SCAN 0 TYPE nope COUNT 100", b"*2\r\n$1\r\n0\r\n*0\r\n"),
    # string
    ("GET job:temp:soon", b"$5\r\nhello\r\n"),
    ("GET job:temp:gone", b"$-1\r\n"),
    ("GET job:stats:a", WRONGTYPE),
    ("MGET job:temp:1 job:stats:a nope", b"*3\r\n$1\r\n1\r\n$-1\r\n$-1\r\n"),
    ("STRLEN job:temp:soon", b":5\r\n"),
    ("STRLEN nope", b":0\r\n"),
    ("GETRANGE job:temp:soon 1 -2", b"$3\r\nell\r\n"),
    ("GETRANGE job:temp:soon -3 -4", b"$0\r\n\r\n"),
    ("GETRANGE job:temp:soon -100 100", b"$5\r\nhello\r\n"),
    ("GETRANGE job:temp:soon 4 1", b"$0\r\n\r\n"),
    ("GETRANGE nope 0 x", NOT_INTEGER),
    ("SUBSTR job:temp:soon 0 0", b"$1\r\nh\r\n"),
    # hash
    ("HGET job:stats:a high", b"$1\r\n9\r\n"),
    ("HGET job:stats:a nope", b"$-1\r\n"),
    ("HGET job:temp:1 x", WRONGTYPE),
    ("HMGET job:stats:a high nope", b"*2\r\n$1\r\n9\r\n$-1\r\n"),
    ("HMGET nope a", b"*1\r\n$-1\r\n"),
    ("HGETALL job:stats:a", b"*4\r\n$3\r\nlow\r\n$1\r\n1\r\n$4\r\nhigh\r\n$1\r\n9\r\n"),
    ("HGETALL nope", b"*0\r\n"),
    ("HGETALL job:temp:1", WRONGTYPE),
    ("HKEYS job:stats:a", b"*2\r\n$3\r\nlow\r\n$4\r\nhigh\r\n"),
    ("HVALS job:stats:a", b"*2\r\n$1\r\n1\r\n$1\r\n9\r\n"),
    ("HLEN job:visits:/", b":1500\r\n"),
    ("HLEN nope", b":0\r\n"),
    ("HEXISTS job:stats:a low", b":1\r\n"),
    ("HEXISTS nope low", b":0\r\n"),
    ("HSTRLEN job:stats:a low", b":1\r\n"),
    ("HSCAN job:stats:a 0 MATCH l*", b"*2\r\n$1\r\n0\r\n*2\r\n$3\r\nlow\r\n$1\r\n1\r\n"),
    ("HSCAN job:stats:a 0 NOVALUES", b"*2\r\n$1\r\n0\r\n*2\r\n$3\r\nlow\r\n$4\r\nhigh\r\n"),
    ("HSCAN job:stats:a 0 TYPE hash", SYNTAX),
    ("HSCAN nope 0 FOO", b"*2\r\n$1\r\n0\r\n*0\r\n"),
    ("HSCAN nope x", b"-ERR invalid cursor\r\n"),
    ("HSCAN job:temp:1 0", WRONGTYPE),
    ("HTTL job:visits:ttl FIELDS 3 on off nope", b"*3\r\n:3\r\n:-1\r\n:-2\r\n"),
    ("HPTTL job:visits:ttl fields 1 on", b"*1\r\n:2500\r\n"),
    ("HEXPIRETIME job:visits:ttl FIELDS 1 on", b"*1\r\n:1700000003\r\n"),
    ("HPEXPIRETIME job:visits:ttl FIELDS 1 on", b"*1\r\n:1700000002500\r\n"),
    ("HTTL job:stats:a FIELDS 2 low nope", b"*2\r\n:-1\r\n:-2\r\n"),
    ("HTTL nope FIELDS 2 a b", b"*2\r\n:-2\r\n:-2\r\n"),
    ("HTTL job:temp:1 FOO 1 a", WRONGTYPE),
    ("HTTL nope FOO 1 a", b"-ERR Mandatory argument FIELDS is missing or not at the right position\r\n"),
    ("HTTL nope FIELDS 0 a", b"-ERR Number of fields must be a positive integer\r\n"),
    ("HTTL nope FIELDS 2 a", b"-ERR The `numfields` parameter must match the number of arguments\r\n"),
    # list
    ("TYPE job:news:a", b"+list\r\n"),
    ("LLEN job:news:a", b":5\r\n"),
    ("LLEN nope", b":0\r\n"),
    ("LLEN job:temp:1", WRONGTYPE),
    ("LINDEX job:news:a 1", b"$1\r\ny\r\n"),
    ("LINDEX job:news:a -2", b"$1\r\nz\r\n"),
    ("LINDEX job:news:a 5", b"$-1\r\n"),
    ("LINDEX job:news:a -6", b"$-1\r\n"),
    ("LINDEX job:news:a x", NOT_INTEGER),
    ("LINDEX nope x", b"$-1\r\n"),
    ("LINDEX job:temp:1 x", WRONGTYPE),
    ("LRANGE job:news:a 1 -3", b"*2\r\n$1\r\ny\r\n$1\r\nx\r\n"),
    ("LRANGE job:news:a -100 0", b"*1\r\n$1\r\nx\r\n"),
    ("LRANGE job:news:a 3 100", b"*2\r\n$1\r\nz\r\n$1\r\nx\r\n"),
    ("LRANGE job:news:a 3 2", b"*0\r\n"),
    ("LRANGE nope 0 x", NOT_INTEGER),
    ("LRANGE job:news:long 700 701", b"*2\r\n$1\r\n0\r\n$1\r\n1\r\n"),
    ("LPOS job:news:a x", b":0\r\n"),
    ("LPOS job:news:a x RANK 2", b":2\r\n"),
    ("LPOS job:news:a x RANK -1 COUNT 2", b"*2\r\n:4\r\n:2\r\n"),
    ("LPOS job:news:a x COUNT 0 MAXLEN 4", b"*2\r\n:0\r\n:2\r\n"),
    ("LPOS job:news:a nope", b"$-1\r\n"),
    ("LPOS job:news:a nope COUNT 1", b"*0\r\n"),
    ("LPOS job:news:long 5 COUNT 0", b"*3\r\n:5\r\n:705\r\n:1405\r\n"),
    ("LPOS job:news:long 5 RANK -1", b":1405\r\n"),
    ("LPOS job:news:long 5 RANK 4", b"$-1\r\n"),
    ("LPOS job:news:long 5 RANK -2 MAXLEN 100 COUNT 0", b"*0\r\n"),
    ("LPOS nope a RANK 0", LPOS_RANK),
    ("LPOS nope a COUNT -1", b"-ERR COUNT can't be negative\r\n"),
    ("LPOS nope a FOO 1", SYNTAX),
    # types that no state is
    ("SMEMBERS nope", b"*0\r\n"),
    ("SMISMEMBER nope a b", b"*2\r\n:0\r\n:0\r\n"),
    ("SRANDMEMBER nope", b"$-1\r\n"),
    ("SRANDMEMBER nope 2", b"*0\r\n"),
    ("SINTER nope job:stats:a", WRONGTYPE),
    ("ZSCORE nope a", b"$-1\r\n"),
    ("XLEN nope", b":0\r\n"),
    # command
    ("COMMAND COUNT", b":251\r\n"),
    ("COMMAND INFO nope", b"*1\r\n$-1\r\n"),
    ("COMMAND DOCS nope", b"*0\r\n"),
    ("COMMAND GETKEYS mset a 1 b 2", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    ("COMMAND GETKEYS eval x 2 a b c", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    ("COMMAND GETKEYS eval x 0 a", b"*0\r\n"),
    ("COMMAND GETKEYS zunionstore a 1 b", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    ("COMMAND GETKEYS zunionstore a 0 b", b"-ERR Invalid arguments specified for command\r\n"),
    ("COMMAND GETKEYS xread streams a b 0 0", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    ("COMMAND GETKEYS ping x", b"-ERR The command has no key arguments\r\n"),
    ("COMMAND GETKEYS foo x", b"-ERR Invalid command specified\r\n"),
    ("COMMAND GETKEYS get a b", b"-ERR Invalid number of arguments specified for command\r\n"),
    ("COMMAND GETKEYS zinterstore a x b", b"-ERR Invalid arguments specified for command\r\n"),
    ("COMMAND GETKEYSANDFLAGS get a", b"*1\r\n*2\r\n$1\r\na\r\n*2\r\n+RO\r\n+access\r\n"),
    ("COMMAND LIST FILTERBY PATTERN getr*", b"*1\r\n$8\r\ngetrange\r\n"),
    ("COMMAND LIST FILTERBY FOO x", SYNTAX),
    ("COMMAND LIST FOO", SYNTAX),
    # state
    ("STATE LIST nope", b"-ERR no such job 'nope'; jobs: job\r\n"),
    ("STATE DESCRIBE job:nope", b"-ERR no such state 'nope' in job 'job'; states: temp, stats, visits, news\r\n"),
    ("STATE FOO", b"-ERR unknown subcommand 'FOO'. Try STATE HELP.\r\n"),
]


@pytest.mark.parametrize(("line", "reply"), REPLIES, ids=[line for line, _ in REPLIES])
def test_command_answers(client: Any, line: str, reply: bytes) -> None:
    assert client.ask(line) == reply


def test_hello_replies_in_requested_protocol(client: Any) -> None:
    assert client.ask("HELLO 3 SETNAME me") == encode(
        {
            b"server": b"redis",
            b"version": b"7.4.0",
            b"proto": 3,
            b"id": 7,
            b"mode": b"standalone",
            b"role": b"master",
            b"modules": [],
            b"sparkis_version": VERSION.encode(),
        },
        3,
    )
    assert client.ask("CLIENT GETNAME") == b"$2\r\nme\r\n"
    assert client.ask("HELLO 2").startswith(b"*16\r\n")


def test_failed_hello_changes_nothing(connect: Callable[..., Any]) -> None:
    client = connect(password="secret")
    assert client.ask("HELLO 3 AUTH default wrong SETNAME me").startswith(b"-WRONGPASS")
    assert client.ask("HELLO 3").startswith(b"-NOAUTH HELLO must be called with the client already authenticated")
    assert (client.session.protocol, client.session.name, client.session.is_authenticated) == (2, b"", False)
    assert client.ask("AUTH wrong").startswith(b"-WRONGPASS")
    assert client.ask("AUTH default secret") == b"+OK\r\n"


def test_role_and_info_report_replica(connect: Callable[..., Any]) -> None:
    client = connect(role="slave")
    assert b"replica" in client.ask("HELLO 2")
    assert client.ask("ROLE").startswith(b"*5\r\n$5\r\nslave\r\n")
    assert b"role:slave\r\n" in client.ask("INFO replication")
    assert b"master_link_status:up\r\n" in client.ask("INFO replication")
    client.server.keyspace.jobs["job"].is_stale = True
    assert b"master_link_status:down\r\n" in client.ask("INFO replication")


def test_info_has_requested_sections(client: Any) -> None:
    everything = client.ask("INFO everything").decode()
    db0 = "db0:keys=27,expires=2,avg_ttl=2500,subexpiry=1"
    for field in ("redis_version:7.4.0", f"sparkis_version:{VERSION}", "connected_clients:1", "cluster_enabled:0", db0):
        assert f"\r\n{field}\r\n" in everything
    assert "# Commandstats" in everything
    assert "# Commandstats" not in client.ask("INFO").decode()
    two = client.ask("INFO server KEYSPACE").decode()
    assert [line for line in two.splitlines() if line.startswith("#")] == ["# Server", "# Keyspace"]


def test_info_has_each_job(client: Any) -> None:
    expected = (
        "job_job:epoch=4,committed_epoch=6,lag_epochs=2,lag_ms=1500,committed_at=2023-11-14T22:13:19.000Z,age_ms=1000,"
        "stale=0,incomplete=0,held_back_epoch=none,keys=27,store_bytes=0\r\n"
    )
    assert expected in client.ask("INFO sparkis").decode()


def test_state_commands_show_jobs_and_states(client: Any) -> None:
    client.session.protocol = 3
    assert client.ask("STATE JOBS") == encode(
        [
            {
                b"name": b"job",
                b"generation": b"g1",
                b"states": 4,
                b"keys": 27,
                **LAG,
                b"slots": b"0-16383",
                b"store_bytes": 0,
                b"state_names": [b"temp", b"stats", b"visits", b"news"],
                b"key_formats": [
                    b"job:temp:<sensor>",
                    b"job:stats:<sensor>",
                    b"job:visits:<page>",
                    b"job:news:<topic>",
                ],
                b"state_keys": [22, 1, 2, 2],
                b"state_bytes": [440, 100, 30, 0],
            }
        ],
        3,
    )
    assert encode({b"name": b"visits", b"kind": b"map", b"keys": 2, b"bytes": 30}, 3) in client.ask("STATE LIST job")
    described = client.ask("STATE DESCRIBE job:temp")
    for part in ({b"key_format": b"job:temp:<sensor>"}, {b"ttl_ms": 3_600_000}, {b"columns": {b"temp": b"int"}}):
        assert encode(next(iter(part)), 3) in described
    assert b"$17\r\njob:temp:<sensor>\r\n" in described
    assert encode({b"sensor": b"string", b"temp": b"int"}, 3) in described


def test_state_locates_keys(client: Any) -> None:
    client.session.protocol = 3
    found = {b"slot": 12182, b"job": None, b"state": None, b"where": b"this server"}
    assert client.ask("STATE LOCATE foo") == encode(found, 3)
    there = client.ask("STATE LOCATE job:stats:a")
    assert encode(b"stats", 3) in there
    assert encode(b"job", 3) * 2 in there


def test_history_needs_key_of_state_and_log(client: Any) -> None:
    unknown = b"-ERR no state makes keys like '%b'; STATE JOBS lists the key formats\r\n"
    assert client.ask("STATE HISTORY foo") == unknown % b"foo"
    assert client.ask("STATE HISTORY job:stats:a") == (
        b"-ERR job 'job' is served without its log, so it has no history here\r\n"
    )
    client.ask("SELECT 1")
    assert client.ask("STATE HISTORY job:stats:a") == unknown % b"job:stats:a"
    assert client.ask("COMMAND GETKEYS STATE HISTORY job:stats:a COUNT 5") == encode([b"job:stats:a"], 2)


def test_state_lag_counts_epochs_and_milliseconds(client: Any, keyspace: Keyspace) -> None:
    client.session.protocol = 3
    lag = {b"job": b"job", **LAG}
    assert client.ask("STATE LAG") == encode([lag], 3)
    keyspace.jobs["job"].committed_epoch = 4
    lag |= {b"committed": 4, b"lag_epochs": 0, b"lag_ms": 0}
    assert client.ask("STATE LAG") == encode([lag], 3)
    keyspace.jobs["job"].source_lag = {"records": 5, "at_ms": NOW_MS - 250, "partitions": {"a/0": 5, "a/1": 0}}
    lag |= {b"source_lag_records": 5, b"source_lag_at": b"2023-11-14T22:13:19.750Z", b"source_lag_age_ms": 250}
    lag |= {b"source_partitions": [b"a/0", b"a/1"], b"source_partition_lags": [5, 0]}
    keyspace.jobs["job"].record_delays = {"counts": [3], "sum_ms": 60, "p50_ms": 20, "p99_ms": 31}
    lag |= {b"record_delay_p50_ms": 20, b"record_delay_p99_ms": 31}
    assert client.ask("STATE LAG") == encode([lag], 3)


def test_help_lists_served_subcommands(client: Any) -> None:
    helped = client.ask("CLIENT HELP")
    assert b"+CLIENT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:\r\n" in helped
    assert b"+SETNAME <connection-name>\r\n+    Sets the connection name.\r\n" in helped
    assert "LOAD" not in client.server.table.help_lines("script")


def test_client_list_has_line_per_connection(client: Any) -> None:
    client.ask("CLIENT SETINFO LIB-NAME lib")
    line = client.ask("CLIENT LIST").decode()
    assert "id=7 addr=127.0.0.1:5000 laddr=127.0.0.1:6379" in line
    assert " cmd=client|list user=default redir=-1 resp=2 lib-name=lib lib-ver= tot-net-in=" in line
    assert client.ask("CLIENT LIST ID 7 8").decode().count("id=7 ") == 1


def test_large_map_is_answered_whole(client: Any) -> None:
    client.session.protocol = 3
    pairs = {b"u%d" % i: b"%d" % i for i in sorted(range(1500), key=lambda i: field_hash_position(b"u%d" % i))}
    assert client.ask("HGETALL job:visits:/") == encode(pairs, 3)
    assert client.ask("HKEYS job:visits:/") == encode(list(pairs), 3)
    assert client.ask("HVALS job:visits:/") == encode(list(pairs.values()), 3)
    assert client.send([b"HMGET", b"job:visits:/", *pairs]) == encode(list(pairs.values()), 3)


def test_scan_returns_every_key_once(client: Any) -> None:
    client.session.protocol = 3
    found = []
    cursor = b"0"
    while True:
        reply = client.send([b"SCAN", cursor, b"COUNT", b"3"]).split(b"\r\n")
        cursor = reply[2]
        found += reply[5:-1:2]
        if cursor == b"0":
            break
    assert len(found) == len(set(found)) == 26


def test_many_keys_are_counted_in_steps(client: Any) -> None:
    keys = [b"job:temp:%d" % (i % 40) for i in range(4000)]
    assert client.send([b"EXISTS", *keys]) == b":2000\r\n"
    assert client.send([b"MGET", *keys]).startswith(b"*4000\r\n")


def test_reply_in_steps_stays_at_its_epoch(client: Any, keyspace: Keyspace) -> None:
    sliced = client.pipeline.reply_to(client.call, [b"KEYS", b"job:temp:*"])
    keyspace.remove("job")
    client.server.renew()
    assert client.drain(sliced).startswith(b"*21\r\n")
    assert client.ask("KEYS *") == b"*0\r\n"


def test_command_info_has_ten_fields_in_redis_order(client: Any) -> None:
    reply = client.ask("COMMAND INFO get")
    assert reply.startswith(
        b"*1\r\n*10\r\n$3\r\nget\r\n:2\r\n*2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n*3\r\n+@read\r\n"
    )
    assert b"$5\r\nflags\r\n*2\r\n+RO\r\n+access\r\n$12\r\nbegin_search\r\n*4\r\n$4\r\ntype\r\n$5\r\nindex\r\n" in reply
    assert b"$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n" in reply
    assert client.ask("COMMAND").startswith(b"*251\r\n*10\r\n")


def test_command_docs_are_redis_own(client: Any) -> None:
    client.session.protocol = 3
    expected = {
        b"get": {
            b"summary": b"Returns the string value of a key.",
            b"since": b"1.0.0",
            b"group": b"string",
            b"complexity": b"O(1)",
            b"arguments": [
                {b"name": b"key", b"type": b"key", b"display_text": b"key", b"key_spec_index": 0},
            ],
        }
    }
    assert client.ask("COMMAND DOCS get nope") == encode(expected, 3)
    assert client.ask("COMMAND DOCS").startswith(b"%251\r\n")
    assert b"state|jobs" in client.ask("COMMAND DOCS state")


def test_rows_of_commands_are_same_when_they_were_written_before(client: Any) -> None:
    table = client.server.table
    rows = [info_row(each) for each in table]
    docs = {each.name.encode(): docs_row(each) for each in table}
    for protocol in (2, 3, 2, 3):
        client.session.protocol = protocol
        assert client.ask("COMMAND") == encode(rows, protocol)
        assert client.ask("COMMAND DOCS") == encode(docs, protocol)
        assert client.ask("COMMAND INFO hset nope client|id") == encode(
            [info_row(table.get(b"hset")), None, info_row(table.get(b"client|id"))], protocol
        )
        assert client.ask("COMMAND DOCS client|id") == encode(
            {b"client|id": docs[b"client"][b"subcommands"][b"client|id"]}, protocol
        )


def test_too_many_prefixes_are_refused_before_comparison(client: Any) -> None:
    prefixes = [b"%06d" % number for number in range(PREFIX_BYTES_MAX // PREFIX_OVERHEAD_BYTES)]
    prefixes.append(prefixes[0] + b"x")  # which overlap
    words = [word for prefix in prefixes for word in (b"PREFIX", prefix)]
    refused = b"-ERR the prefixes of one client may take 65536 bytes; use fewer, or shorter ones\r\n"
    assert client.send([b"CLIENT", b"TRACKING", b"ON", b"BCAST", *words]) == refused
    assert client.session.tracking_state is None


def test_prefixes_count_with_those_that_client_has_already(client: Any) -> None:
    halves = [[b"%d%06d" % (half, number) for number in range(400)] for half in range(2)]
    asked = [
        [b"CLIENT", b"TRACKING", b"ON", b"BCAST", *(x for each in half for x in (b"PREFIX", each))] for half in halves
    ]
    assert client.send(asked[0]) == b"+OK\r\n"
    assert client.send(asked[1]).startswith(b"-ERR the prefixes of one client may take 65536 bytes")
    assert client.send([b"CLIENT", b"TRACKING", b"OFF"]) == b"+OK\r\n"
    assert client.send(asked[1]) == b"+OK\r\n"


@pytest.mark.parametrize("words", [[], [b"INFO"], [b"INFO", *[b"client", b"nope"] * 100], [b"DOCS"]])
def test_table_is_packed_in_steps_of_row(client: Any, words: list[bytes]) -> None:
    client.server.table.rows.clear()
    sliced = client.pipeline.answer(client.call, [[b"COMMAND", *words]], [])
    rows = len(words) - 1 if len(words) > 1 else len(client.server.table)
    per_row = 2 if words == [b"DOCS"] else 1
    assert [len(chunk) for chunk in sliced.chunks] == [per_row] * rows


def test_cached_rows_are_sent_at_once_and_unchanged(client: Any) -> None:
    for words in ("COMMAND", "COMMAND INFO get nope client", "COMMAND DOCS get", "COMMAND DOCS", "COMMAND LIST"):
        client.server.table.rows.clear()
        for version in (2, 3):
            client.ask(f"HELLO {version}")
            first = client.ask(words)
            assert client.ask(words) == first
            assert client.pipeline.answer(client.call, [words.encode().split()], []) is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"HPTTL", 2500), (b"HTTL", 3), (b"HPEXPIRETIME", NOW_MS + 2500), (b"HEXPIRETIME", 1_700_000_003)],
)
def test_expiry_times_of_many_fields_are_read_in_steps(client: Any, name: bytes, shown: int) -> None:
    request = [name, b"job:visits:ttl", b"FIELDS", b"1200", *[b"on", b"off", b"none"] * 400]
    sliced = client.pipeline.answer(client.call, [request], [])
    assert client.drain(sliced) == encode([shown, -1, -2] * 400, 2)


def test_client_listed_several_times_is_checked_once(client: Any) -> None:
    looked_at: list[int] = []
    client.server.clients.output_bytes = lambda session_id: looked_at.append(session_id) or 0
    assert client.send([b"CLIENT", b"LIST", b"ID", b"7", b"8", b"7", b"7"]).count(b"id=7 ") == 3
    assert looked_at == [7]
