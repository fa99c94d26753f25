"""The options of `sparkis attach`, and the parts of the command that both readers share. Imports no Spark."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from spark_hooks.end_signal import EndSignal
from spark_hooks.serving import endpoints
from spark_hooks.serving.driver_endpoint import DriverEndpoint
from spark_hooks.user_folders import state_folder
from state_backend.attach.attachment import Attachment
from state_backend.attach.states import AttachedState
from state_backend.log.filesystems import open_filesystem
from state_backend.model.descriptor import Kind, StateDescriptor, check_name
from state_backend.model.errors import DescriptorError, SparkisError

REDIS_TYPES = {Kind.VALUE: "string", Kind.MAP: "hash", Kind.LIST: "list"}
# The pause between two checks of the attachment for an error.
POLL_INTERVAL_S = 0.5


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse the NAME=VALUE arguments of an option."""
    parsed = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise DescriptorError(f"{option} takes NAME=VALUE, not {each!r}")
        parsed[name] = value
    return parsed


def job_of(options: argparse.Namespace) -> str:
    """Return the job's name; by default that of the checkpoint's folder."""
    if options.job is not None:
        return check_name("job", options.job)
    name = str(options.checkpoint).rstrip("/").rpartition("/")[2]
    try:
        return check_name("job", name)
    except DescriptorError:
        raise DescriptorError(
            f"the checkpoint's folder {name!r} cannot be the job's name, with which keys begin: give one with --job"
        ) from None


def log_of(options: argparse.Namespace) -> str:
    """Return the log's root; by default a folder of the user's, which all attachments share."""
    if options.log is not None:
        return open_filesystem(options.log).root
    return str(state_folder() / "log")


def announce_to(log: str, addresses: str) -> None:
    """Announce the epochs of a log to its registry and to the addresses on the command line; DescriptorError."""
    try:
        endpoints.announce_to(log, addresses)
    except ValueError as error:
        raise DescriptorError(f"--announce: {error}") from None


def states_of(options: argparse.Namespace) -> list[AttachedState]:
    """Return the state on the command line: a single one, or what is to be done with each state."""
    given: dict[str, Any] = {}
    for name in (
        *("operator", "variable", "key", "key_format", "separator", "field"),
        *("value", "kind", "encoding", "length_max"),
    ):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.column:
        given["columns"] = pairs("--column", options.column)
    return [AttachedState(options.state, **given, on_bad_key=options.on_bad_key)]


def described(
    source: str, names: Sequence[str], state: StateDescriptor, job: str, hint: str | None = None
) -> Iterator[str]:
    """Yield the lines that describe a state: its operator, its columns, and its keys for Redis clients."""
    value = ", ".join(state.value)
    field = f"{state.field} -> " if state.field is not None else ""
    yield source
    yield f"  columns  {', '.join(names)}"
    yield f"  {REDIS_TYPES[state.kind]:<7}  {state.format_for(job).text}  {field}{value}"
    if hint is not None:
        yield f"  hint     {hint}"


def follow(options: argparse.Namespace, ended: EndSignal, attach: Callable[[], Attachment]) -> None:
    """Follow the checkpoint, and serve the log if that is requested, until a signal. SparkisError if it ends."""
    with attach() as attachment:
        endpoint = _serve(attachment.log, options.port) if options.serve else None
        try:
            names = ", ".join(f"{state.key_format} ({REDIS_TYPES[state.kind]})" for state in attachment.states)
            print(f"attached: {names}; log {attachment.log}", flush=True)
            while not (ended.is_set() or attachment.wait(timeout_s=POLL_INTERVAL_S)):
                pass
            if endpoint is not None and not ended.is_set():
                print(f"redis-cli -u {endpoint.url}", flush=True)
            while not ended.wait(POLL_INTERVAL_S):
                if attachment.error is not None:
                    raise SparkisError(str(attachment.error))
        finally:
            if endpoint is not None:
                endpoint.stop()


def _serve(log: str, port: int) -> DriverEndpoint:
    """Start a server of a log as a child process."""
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", log, "--child", "--loglevel", "warning"]
    environment = children.environment() | {TOKEN_VARIABLE: secrets.token_hex()}
    return DriverEndpoint([*command, "--port", str(port)], environment, log=log)
