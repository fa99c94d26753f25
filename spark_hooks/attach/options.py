"""The options of `sparkis attach`, and the parts of the command that both readers share. Imports no Spark."""

from __future__ import annotations

import argparse
import logging
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from resp_server.net import children
from resp_server.net.addresses import address_of
from resp_server.net.listeners import is_wildcard
from resp_server.net.tls import TlsFiles, files_of, server_files_of
from resp_server.programs.listening import password_of
from resp_server.programs.metrics_options import check_metrics
from spark_hooks.attach.followed_queries import FollowedQueries
from spark_hooks.attach.queries import OpenFolder, check_jobs, sources_of
from spark_hooks.command_process import EndSignal, state_folder
from spark_hooks.serving import endpoints
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.placement import with_passwords
from state_backend.attach.attachment import Attachment
from state_backend.attach.states import AttachedArguments, AttachedState, pairs
from state_backend.log.filesystems import open_filesystem
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.attach")

REDIS_TYPES = {Kind.VALUE: "string", Kind.MAP: "hash", Kind.LIST: "list"}
# The options of a single state, by their names in `AttachedState`.
SINGLE_STATE_OPTIONS = (
    "operator",
    "variable",
    "key",
    "key_format",
    "separator",
    "field",
    "value",
    "kind",
    "encoding",
    "length_max",
)
# The options of all states, by their names in `AttachedState`.
ALL_STATES_OPTIONS = ("on_bad_key", "json_decimals")
# The pause between two checks of the attachment for an error.
POLL_INTERVAL_S = 0.5


def listed(options: argparse.Namespace, open_folder: OpenFolder) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint of each query, and the name of its job for a list of states."""
    sources = sources_of(options, open_folder)
    check_jobs(sources)
    for source in sources:
        for query in source.queries():
            is_named = source.job is not None or not source.is_single
            yield source.checkpoint_of(query), source.job_of(query) if is_named else "JOB"


def list_all(options: argparse.Namespace, open_folder: OpenFolder, show: Callable[[str, str], None]) -> None:
    """Show the states of each query; SparkisError if none can be shown. What is wrong with the others is logged.

    Args:
        show: Prints the states of a checkpoint, for a job's name.
    """
    errors: list[str] = []
    is_shown = False
    for checkpoint, job in listed(options, open_folder):
        try:
            show(checkpoint, job)
            is_shown = True
        except SparkisError as error:
            errors.append(str(error))
    if not is_shown:
        raise SparkisError("\n".join(errors))
    for each in errors:
        logger.warning("%s", each)


def log_of(options: argparse.Namespace) -> str:
    """Return the log's root; by default a folder of the user's, which all attachments share."""
    if options.log is not None:
        return open_filesystem(options.log).root
    return str(state_folder() / "log")


def announce_to(log: str, addresses: str, tls: TlsFiles | None) -> None:
    """Announce the epochs of a log to its registry and to the addresses on the command line; DescriptorError."""
    try:
        endpoints.announce_to(log, addresses, tls)
    except ValueError as error:
        raise DescriptorError(f"--announce: {error}") from None


def states_of(options: argparse.Namespace) -> list[AttachedState]:
    """Return the state on the command line: one that is chosen, or a description of each state."""
    if options.states is not None:
        return _states_in(options)
    given = _of_all_states(options)
    for name in SINGLE_STATE_OPTIONS:
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.column:
        given["columns"] = pairs("--column", options.column)
    return [AttachedState(options.state, **given)]


def _of_all_states(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ALL_STATES_OPTIONS}


def _states_in(options: argparse.Namespace) -> list[AttachedState]:
    """Return the states in a TOML file: a table [[state]] for each, with the arguments of `AttachedState`."""
    path = options.states
    single = [name for name in ("state", *SINGLE_STATE_OPTIONS, "column") if getattr(options, name) not in (None, [])]
    if single:
        raise DescriptorError(f"--states {path} describes all states; leave out --{single[0].replace('_', '-')}")
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("state")
    except OSError as error:
        raise DescriptorError(f"--states {path}: {error.strerror}") from None
    except ValueError as error:
        raise DescriptorError(f"--states {path}: {error}") from None
    if not isinstance(tables, list) or not tables:
        raise DescriptorError(f"--states {path} has no table [[state]]; write one for each state")
    known = ["name", *AttachedArguments.__annotations__]
    found = []
    for table in tables:
        given = _of_all_states(options) | {name.replace("-", "_"): each for name, each in table.items()}
        if unknown := sorted(given.keys() - set(known)):
            raise DescriptorError(
                f"--states {path}: {unknown[0]} is no option of a state; the options are {', '.join(known)}"
            )
        found.append(AttachedState(given.pop("name", None), **given))
    return found


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


def follow(
    options: argparse.Namespace, ended: EndSignal, attach: Callable[[str, str], Attachment], open_folder: OpenFolder
) -> None:
    """Follow the checkpoints, and serve the log if that is requested, until a signal. SparkisError if all end.

    Args:
        attach: Makes the attachment of a checkpoint and a job's name.
        open_folder: Opens a folder of the storage that has the checkpoints.
    """
    if options.reader == "files":  # the other reader has the addresses in a setting of Spark
        announce_to(log_of(options), options.announce, files_of(options))
    with ExitStack() as stack:
        queries = stack.enter_context(FollowedQueries(sources_of(options, open_folder), attach))
        waiting = queries.start()
        endpoint = _serve(options, waiting[0].log if waiting else log_of(options)) if options.serve else None
        if endpoint is not None:
            stack.callback(endpoint.stop)
        for attachment in waiting:
            _print_attached(attachment)
        has_url = endpoint is None
        while not ended.wait(0 if waiting else POLL_INTERVAL_S):
            waiting = [each for each in waiting if not _is_ready(each, POLL_INTERVAL_S / len(waiting))]
            if not waiting and not has_url and endpoint is not None:
                has_url = True
                print(f"redis-cli -u {endpoint.url}", flush=True)
            for attachment in queries.look():
                _print_attached(attachment)
            queries.check()


def _print_attached(attachment: Attachment) -> None:
    names = ", ".join(f"{state.key_format} ({REDIS_TYPES[state.kind]})" for state in attachment.states)
    print(f"attached: {names}; log {attachment.log}", flush=True)


def _is_ready(attachment: Attachment, timeout_s: float) -> bool:
    """Wait for a moment; return whether an attachment's state is readable, or the attachment has ended."""
    try:
        return attachment.wait(timeout_s=timeout_s)
    except Exception:
        if attachment.error is None:
            raise
        return True


def _serve(options: argparse.Namespace, log: str) -> DetachedEndpoint:
    """Return the server of a log, with the options of the command: the one that runs, or a new one."""
    check_metrics(options)
    tls, password = server_files_of(options), password_of(options)
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", log, "--bind", *options.bind]
    command += ["--loglevel", "warning", *([] if tls is None else tls.arguments())]
    command += [] if options.aclfile is None else ["--aclfile", options.aclfile]
    if options.metrics is not None:
        command += ["--metrics", address_of(*options.metrics)]
    if options.ready_lag_max is not None:
        command += ["--ready-lag-max", str(options.ready_lag_max)]
    return DetachedEndpoint(
        command,
        with_passwords(children.environment(), password, None),
        log=log,
        host="127.0.0.1" if is_wildcard(options.bind[0]) else options.bind[0],
        port=options.port,
        password=password,
        store=None if options.store is None else str(Path(options.store).expanduser()),
        linger_s=options.linger,
        tls=tls,
        outlives_exit=False,
    )
