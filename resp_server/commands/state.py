"""STATE: jobs and states, and subcommands that proxies use. Redis has no such command.

They are read commands: a user sees the jobs and states of keys that it may read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from resp_server.acl.selector import RuleError
from resp_server.acl.user import User
from resp_server.command.handler import OneOrMore, command, integer
from resp_server.command.policy import OF_SERVERS
from resp_server.command.spec import (
    ALL_KEYS,
    ANY_SLOTS,
    ONE_KEY,
    CommandSpec,
    Json,
    argument,
    our_facts,
)
from resp_server.commands.job_facts import lag_row_of, reply_of, row_of
from resp_server.commands.string import values_reply
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.histories import HistoryRequest
from resp_server.protocol.errors import GenericError, NoPermError, client_text, cluster_disabled, syntax_error
from resp_server.protocol.replies import OK, Frames, Reply, encode
from resp_server.session.account import Account
from state_backend.history.limits import COUNT_DEFAULT, COUNT_MAX
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Job
from state_backend.store.uncommitted import FreshFacts

O_JOBS = "O(N) where N is the number of jobs"


def _facts(*arguments: Json, complexity: str = O_JOBS, keys: Json | None = None) -> CommandSpec:
    """Return the facts that most STATE subcommands share."""
    return our_facts(complexity, "readonly loading stale fast", "@read @fast", *arguments, keys=keys)


@command("state|jobs", ours=_facts())
def state_jobs(context: CommandContext) -> Reply:
    """Lists the jobs that this server serves, and their status."""
    visibility = context.visibility
    visibility.view.check_complete()
    return reply_of(row_of(visible, context.now_ms) for visible in visibility.jobs())


@command("state|list", ours=_facts(argument("job"), complexity="O(N) where N is the number of states of the job"))
def state_list(context: CommandContext, job: bytes) -> Reply:
    """Lists the states of a job, their kinds, numbers of keys, and bytes."""
    visibility, requested_job = context.visibility, _job(context, job)
    visibility.view.check_complete()
    return [
        {
            b"name": state.name.encode(),
            b"kind": str(state.kind).encode(),
            b"keys": visible.keys_of(state.name),
            b"bytes": visible.bytes_of(state.name),
        }
        for visible in visibility.jobs()
        if visible.job.name == requested_job.name
        for state in visible.states
    ]


@command("state|describe", ours=_facts(argument("job:state")))
def state_describe(context: CommandContext, name: bytes) -> Reply:
    """Describes a state: its key format, columns and options."""
    job_name, _, state_name = name.partition(b":")
    job = _job(context, job_name)
    states = next((visible.states for visible in context.visibility.jobs() if visible.job.name == job.name), ())
    state = next((each for each in states if each.name.encode() == state_name), None)
    if state is None:
        raise GenericError(
            f"no such state '{client_text(state_name)}' in job '{job.name}'; states: {_names(states) or 'none'}"
        )
    applied = context.view.snapshot_of(job.name).applied
    return _description(job, state, None if job.fresh is None else job.fresh.facts(applied.epoch))


def _description(job: Job, state: StateDescriptor, fresh: FreshFacts | None) -> Reply:
    return {
        b"job": job.name.encode(),
        b"state": state.name.encode(),
        b"kind": str(state.kind).encode(),
        b"key_format": state.format_for(job.name).text.encode(),
        b"value": [column.encode() for column in state.value],
        b"field": _text(state.field),
        b"member": _text(state.member),
        b"score": _text(state.score),
        b"columns": {column.encode(): kind.encode() for column, kind in state.columns.items()},
        b"encoding": str(state.encoding).encode(),
        b"ttl_ms": state.ttl_ms,
        b"deletion": _text(state.deletion),
        b"order_by": [column.encode() for column in state.order_by],
        b"duplicates": state.duplicates.encode(),
        b"length_max": state.length_max,
        b"reduce": _text(state.reduce),
        b"by": _text(state.by),
        b"by_columns": [column.encode() for column in state.by_columns],
        b"where": _text(state.where),
        b"fresh_keys": 0 if fresh is None else fresh.keys_of.get(state.name, 0),
    }


def _text(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _names(items: Sequence[Job] | Sequence[StateDescriptor]) -> str:
    return ", ".join(item.name for item in items)


@command("state|locate", ours=_facts(argument("key"), complexity="O(1)", keys=ONE_KEY))
def state_locate(context: CommandContext, key: bytes) -> Reply:
    """Locates a key: its slot, its job and state, and its server."""
    info = context.at(key).key_info(key)
    job = None if info is None else context.view.job_of(key)
    return {
        b"slot": slot_of(key),
        b"job": _text(job),
        b"state": None if info is None else info.state.encode(),
        b"where": b"this server",
    }


@command(
    "state|mget",
    ours=our_facts(
        "O(N) where N is the number of keys",
        "readonly fast",
        "@read @string @fast",
        argument("key", "key", "multiple", key_spec_index=0),
        keys=ALL_KEYS,
        tips=(ANY_SLOTS,),
    ),
)
def state_mget(context: CommandContext, *keys: OneOrMore) -> Reply:
    """Returns the values of keys as MGET does, at one epoch of each job; the keys may be in several slots."""
    return values_reply(context, keys)


@command(
    "state|history",
    ours=our_facts(
        "O(N) where N is the number of epochs that are read in the log",
        "readonly noscript no_multi",
        "@read @slow",
        argument("key", "key", key_spec_index=0),
        argument("count", "integer", "optional", token="COUNT", display_text="n"),
        keys=ONE_KEY,
    ),
)
def state_history(context: CommandContext, key: bytes, *options: bytes) -> Reply:
    """Returns the values that a key had, the newest first, as far back as its job's log can be read."""
    count = _history_count(options)
    name = context.view.job_of(key)
    job = next((each for each in context.view.jobs() if each.name == name), None)
    if job is None or not any(re.match(state.format_for(job.name).pattern(), key, re.DOTALL) for state in job.states):
        raise GenericError(f"no state makes keys like '{client_text(key)}'; STATE JOBS lists the key formats")
    if not job.log:
        raise GenericError(f"job '{job.name}' is served without its log, so it has no history here")
    applied = context.view.committed.at(key).applied
    if applied.epoch < 0:
        return []
    request = HistoryRequest(job.log, job.name, job.generation, applied.epoch, key, count, context.session.protocol)
    return context.server.histories.read(request)


def _history_count(options: Sequence[bytes]) -> int:
    if not options:
        return COUNT_DEFAULT
    if len(options) != 2 or options[0].upper() != b"COUNT":
        raise syntax_error()
    count = integer(options[1])
    if not 1 <= count <= COUNT_MAX:
        raise GenericError(f"COUNT must be from 1 to {COUNT_MAX}")
    return count


@command("state|lag", ours=_facts())
def state_lag(context: CommandContext) -> Reply:
    """Reports how far each job's readable state is behind its committed epoch, and its age."""
    return reply_of(lag_row_of(visible, context.now_ms) for visible in context.visibility.jobs())


@command("state|follow", ours=_facts({"name": "keys", "type": "pure-token", "token": "KEYS", "flags": ["optional"]}))
def state_follow(context: CommandContext, option: bytes = b"") -> Reply:
    """Pushes each new epoch and topology to this connection, before the first reply that is read from it."""
    if option and option.upper() != b"KEYS":
        raise syntax_error()
    check_reads_all_keys(context)
    pushes = context.server.follow(context.session, has_keys=bool(option))
    return Frames(encode(OK, context.session.protocol) + pushes)


def check_reads_all_keys(context: CommandContext) -> None:
    """Raise NoPermError for a user that may not read all keys: the reply names all jobs. Proxies may read all keys."""
    if not context.user.reads_all_keys:
        raise NoPermError("This needs a user that may read all keys")


@dataclass(slots=True)
class ReaderContext(CommandContext):
    """The context of a command on behalf of another user, who may read only some keys."""

    reader: User

    @property
    def user(self) -> Account:
        return self.reader


@command(
    "state|within",
    ours=our_facts(
        "That of the command",
        "readonly stale no_multi",
        "@read @slow",
        argument("numpatterns", "integer"),
        argument("pattern", "string", "multiple"),
        argument("command", "string", "multiple"),
    ),
)
def state_within(context: CommandContext, count: int, *arguments: OneOrMore) -> Reply:
    """Runs a command about the whole keyspace for a proxy's user, who may read only keys that match a pattern."""
    check_reads_all_keys(context)
    if not 0 <= count < len(arguments):
        raise syntax_error()
    reader = User(b"")
    try:
        for pattern in arguments[:count]:
            reader.apply(b"%R~" + pattern)
    except RuleError as error:
        raise GenericError(str(error)) from None
    request = arguments[count:]
    target = context.server.table.find(request)
    target.check_arity(request)
    if target.policy.answered_by not in OF_SERVERS:
        raise GenericError(f"'{target.name}' is not about the whole keyspace; send it without STATE WITHIN")
    return target.execute(ReaderContext(context.session, context.server, reader), [request])[0]


@command("state|topology", ours=_facts(complexity="O(N) where N is the number of nodes"))
def state_topology(context: CommandContext) -> Reply:
    """Returns the topology of this server's cluster as JSON."""
    if context.server.cluster is None:
        raise cluster_disabled()
    return json.dumps(context.server.cluster.topology.to_json()).encode()


@command("state|help", ours=_facts(complexity="O(1)"))
def state_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("state")


def _job(context: CommandContext, name: bytes) -> Job:
    visibility = context.visibility
    jobs = {name: each for name, each in context.server.keyspace.jobs.items() if visibility.sees(name)}
    if context.session.db != 0:
        jobs = {}
    job = jobs.get(name.decode("utf-8", "surrogateescape"))
    if job is None:
        raise GenericError(f"no such job '{client_text(name)}'; jobs: {_names(list(jobs.values())) or 'none'}")
    return job
