"""The command table, built at start-up: all commands of Redis 7.4 and ours, whether they are served or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from resp_server.command.handler import CommandHandler, DeclarationError, WorkerQuery, check_count
from resp_server.command.keys import key_positions, single_key_position
from resp_server.command.policies import policy_of
from resp_server.command.policy import OF_SERVERS, PATTERNS, AnsweredBy, Policy, Refusal, SpecialCommand, Verb
from resp_server.command.spec import CommandSpec, Json
from resp_server.protocol.errors import (
    ReadOnlyError,
    not_served,
    unknown_command,
    unknown_subcommand,
    wrong_arity,
)
from resp_server.protocol.replies import Frames, Reply, encode


@dataclass(frozen=True)
class Command:
    """A command or subcommand. One without a handler is not served; its reply is the error that `refusal` makes.

    Args:
        is_refused_when_run: In a transaction the command is queued, and EXEC replies with the error.
    """

    name: str
    facts: CommandSpec
    handler: CommandHandler | None = None
    refusal: Refusal = ReadOnlyError
    is_refused_when_run: bool = False
    subcommands: Mapping[bytes, Command] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Policy:
        """Our row of the command."""
        return policy_of(self.name)

    @cached_property
    def answered_without_upstream(self) -> AnsweredBy:
        """What answers the command without an upstream: `LOCAL`, `STATES`, or one of `OF_SERVERS`.

        A proxy itself refuses commands that sparkis does not have.
        """
        if self.handler is None or self.facts.group in ("transactions", "pubsub"):
            return AnsweredBy.LOCAL
        if self.facts.key_specs:
            return AnsweredBy.STATES
        named = self.policy.answered_by
        return named if named in OF_SERVERS else AnsweredBy.LOCAL

    @cached_property
    def words(self) -> int:
        """The number of words in the name: 2 for a subcommand."""
        return 1 + self.name.count("|")

    @cached_property
    def single_key_at(self) -> int:
        """The position of the only key; 0: there are several, or none at a fixed position."""
        return single_key_position(self.name, self.facts)

    @property
    def is_served(self) -> bool:
        """Whether the command, or one of its subcommands, has a handler."""
        return self.handler is not None or any(subcommand.is_served for subcommand in self.subcommands.values())

    def check_arity(self, request: Sequence[bytes]) -> None:
        """Raise GenericError if the number of arguments does not match the arity."""
        if not self.facts.has_arity_of(request):
            raise wrong_arity(self.name)

    def keys_in(self, request: Sequence[bytes]) -> Sequence[tuple[int, Sequence[str]]]:
        """Return the positions of a request's keys, with their access flags; without those that only choose a slot."""
        return [(at, flags) for at, flags in key_positions(self.facts, request) or () if "not_key" not in flags]

    def channels_in(self, request: Sequence[bytes]) -> Sequence[tuple[int, bool]]:
        """Return (position, whether it is a pattern) of each channel of a request."""
        if self.policy.channel_at:
            return [(self.policy.channel_at, False)]
        channels = self.policy.channels
        if channels is None or channels.verb is not Verb.SUBSCRIBE:
            return []
        return [(index, channels.kind == PATTERNS) for index in range(1, len(request))]

    @cached_property
    def _takes_bytes(self) -> bool:
        """Whether the function takes all arguments unchanged, in the exact number of the arity."""
        parameters = None if self.handler is None else self.handler.parameters
        takes_bytes = parameters is not None and parameters.needs_no_conversion and not parameters.has_name
        return takes_bytes and self.facts.arity > 0

    def execute(self, context: Any, requests: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Run the command for one or more of the requests, from the first on; return the replies to these.

        All requests have the same number of arguments, which matches the arity.
        """
        if self.handler is None:
            raise self.refusal()
        body, parameters = self.handler.body, self.handler.parameters
        if parameters.is_batch:
            replies: list[Reply] = body(context, [request[-1] for request in requests])
            return replies
        request = requests[0]
        arguments: Sequence[Any] = request[self.words :]
        if self._takes_bytes:
            return [body(context, *arguments)]
        if parameters.count_max is not None:
            check_count(parameters, self.name, request)
        if not parameters.needs_no_conversion:
            arguments = parameters.convert(arguments)
        return [body(context, request[0], *arguments) if parameters.has_name else body(context, *arguments)]


class CommandTable:
    """All commands by name, in lower case."""

    def __init__(
        self,
        redis: Mapping[str, CommandSpec],
        handlers: Iterable[CommandHandler],
        worker_queries: Iterable[WorkerQuery] = (),
    ) -> None:
        """Join the reference table with the handlers; DeclarationError if they do not match.

        Args:
            worker_queries: The queries that commands send to the other processes of the server.
        """
        self.worker_queries = {query.name: query for query in worker_queries}
        declared = _by_name(handlers)
        facts = _with_ours(redis, declared)
        for name in declared:
            if _find_facts(facts, name) is None:
                raise DeclarationError(f"command {name!r} is not one of Redis and states no facts of its own")
        # The encoded rows of COMMAND and COMMAND DOCS, by kind, name and protocol version; 0.6 MB for all.
        self.rows: dict[tuple[str, str, int], Frames] = {}
        self._help: dict[str, Frames] = {}
        self._names_in: dict[str, frozenset[str]] = {}
        self._commands = {name.encode(): _row(name, each, declared) for name, each in facts.items()}

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def __len__(self) -> int:
        return len(self._commands)

    def with_subcommands(self) -> list[Command]:
        """Return all commands, each followed by its subcommands."""
        return [each for one in self for each in (one, *one.subcommands.values())]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all commands and subcommands."""
        return frozenset(each.name for each in self.with_subcommands())

    def names_in(self, category: str) -> frozenset[str]:
        """Return the names of the commands of a category, such as `@read`, with all subcommands of its containers."""
        found = self._names_in.get(category)
        if found is None:
            members = [each for each in self.with_subcommands() if category in each.facts.acl_categories]
            found = frozenset(one.name for each in members for one in (each, *each.subcommands.values()))
            self._names_in[category] = found
        return found

    def get(self, full_name: bytes) -> Command | None:
        """Return a command by its name in any case, or a subcommand by `client|id`; None if there is none."""
        name, bar, sub = full_name.lower().partition(b"|")
        found = self._commands.get(name)
        return found.subcommands.get(sub) if found is not None and bar else found

    def special_of(self, request: Sequence[bytes]) -> SpecialCommand | None:
        """Return which special command or subcommand a request is of; None if it is not special, or is unknown."""
        found = self._commands.get(request[0].lower())
        if found is not None and found.subcommands and len(request) > 1:
            found = found.subcommands.get(request[1].lower())
        return None if found is None else found.policy.special

    def keeps_caching(self, request: Sequence[bytes]) -> bool:
        """Return whether CLIENT CACHING is about the command after this request."""
        found = self._commands.get(request[0].lower())
        return found is not None and found.policy.keeps_caching

    def help(self, container: str) -> Frames:
        """Return the reply to `CLIENT HELP`, which is made once: in both versions of the protocol it is the same."""
        if container not in self._help:
            self._help[container] = Frames(encode(self.help_lines(container), 2))
        return self._help[container]

    def help_lines(self, container: str) -> list[Reply]:
        """Return the lines of `CLIENT HELP`: the subcommands that are served, with their summaries."""
        lines: list[Reply] = [f"{container.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
        for name, each in self._commands[container.encode()].subcommands.items():
            if each.handler is not None:
                arguments = "".join(f" {_help_text(argument)}" for argument in each.facts.arguments)
                lines += (f"{name.decode().upper()}{arguments}", f"    {each.facts.summary}")
        return lines

    def find(self, request: Sequence[bytes]) -> Command:
        """Return the command, or subcommand, that a request names; GenericError if there is none."""
        found = self._commands.get(request[0].lower())
        if found is None:
            raise unknown_command(request)
        if found.subcommands and len(request) > 1:
            sub = found.subcommands.get(request[1].lower())
            if sub is None:
                raise unknown_subcommand(found.name, request[1])
            return sub
        return found


def _help_text(argument: Json) -> str:
    """Return an argument as HELP shows it: `<key> [<key> ...]`, `[SAMPLES <count>]`, `(YES|NO)`."""
    parts = [_help_text(each) for each in argument.get("arguments", ())]
    kind, flags = argument.get("type"), argument.get("flags", ())
    if kind == "pure-token":
        text = ""
    elif kind == "oneof":
        text = "|".join(parts)
        text = text if "optional" in flags else f"({text})"
    else:
        text = " ".join(parts) if parts else f"<{argument.get('display_text', argument['name'])}>"
    if "multiple" in flags:
        text = f"{text} ..." if kind == "oneof" else f"{text} [{text} ...]"
    text = " ".join(filter(None, (argument.get("token", ""), text)))
    return f"[{text}]" if "optional" in flags else text


def _by_name(handlers: Iterable[CommandHandler]) -> dict[str, CommandHandler]:
    declared: dict[str, CommandHandler] = {}
    for each in handlers:
        if each.name in declared:
            raise DeclarationError(f"command {each.name!r} is declared twice")
        if each.name != each.name.lower() or each.name.count("|") > 1:
            raise DeclarationError(f"command {each.name!r}: a name is in lower case, with at most one |")
        if each.summary == "":
            raise DeclarationError(f"command {each.name!r} has no docstring, which would be its summary")
        declared[each.name] = each
    return declared


def _with_ours(redis: Mapping[str, CommandSpec], declared: Mapping[str, CommandHandler]) -> dict[str, CommandSpec]:
    """Add our own commands; the first subcommand of a container adds the container."""
    facts = dict(redis)
    for name, each in declared.items():
        if each.ours is None:
            continue
        if _find_facts(facts, name) is not None:
            raise DeclarationError(f"command {name!r} is one of Redis; its facts are in the reference table")
        ours = replace(each.ours, arity=each.arity, summary=each.summary or "")
        container, _, sub = name.partition("|")
        if sub:
            parent = facts.get(container) or CommandSpec(
                ours.since, ours.group, arity=-2, summary=f"The {container} commands."
            )
            facts[container] = parent.with_subcommand(name, ours)
        else:
            facts[name] = ours
    return facts


def _find_facts(facts: Mapping[str, CommandSpec], name: str) -> CommandSpec | None:
    container = facts.get(name.partition("|")[0])
    return container.subcommands.get(name) if container is not None and "|" in name else container


def _row(name: str, facts: CommandSpec, declared: Mapping[str, CommandHandler]) -> Command:
    handler = declared.get(name)
    if handler is not None:
        _check_row(handler, facts)
        facts = replace(facts, summary=handler.summary or facts.summary)
    subcommands = {
        full_name.partition("|")[2].encode(): _row(full_name, each, declared)
        for full_name, each in facts.subcommands.items()
    }
    policy = policy_of(name)
    if policy.refusal is not None:
        return Command(name, facts, handler, policy.refusal, not policy.is_refused_at_once, subcommands)
    refusal = ReadOnlyError if facts.is_write else partial(not_served, name)
    return Command(name, facts, handler, refusal, False, subcommands)


def _check_row(handler: CommandHandler, facts: CommandSpec) -> None:
    if facts.is_write:
        raise DeclarationError(f"command {handler.name!r} is a write; this server only reads")
    takes_subcommand = bool(facts.subcommands) and not handler.parameters.each
    if handler.arity != facts.arity and not (takes_subcommand and facts.arity == -1):
        raise DeclarationError(
            f"command {handler.name!r}: its signature makes the arity {handler.arity}; Redis has {facts.arity}"
        )
