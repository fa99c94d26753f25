"""The states that an analysis of keys needs: from a log or from a server. A server also looks up keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from resp_server.backends.routing.key_analysis import AnalyzedKeys, AnalyzedState
from resp_server.backends.routing.rules import Owner
from resp_server.commands.generic import TYPE_NAMES
from resp_server.net.client import Client, ClientError
from state_backend.log.change_log import ChangeLog
from state_backend.model.descriptor import Kind, StateDescriptor


def states_of_log(root: str) -> Iterator[AnalyzedState]:
    """Iterate over the states of a log's jobs."""
    for name, states in _states_by_job(root):
        for state in states:
            yield AnalyzedState(f"{name}:{state.name}", state.format_for(name).text, TYPE_NAMES[state.kind])


def key_formats_of_log(root: str) -> Mapping[str, Mapping[str, str]]:
    """Return the key formats of a log's jobs, by job and state, also of jobs that no server serves; SparkisError."""
    return {
        name: {state.name: state.format_for(name).text for state in states} for name, states in _states_by_job(root)
    }


def _states_by_job(root: str) -> Iterator[tuple[str, Sequence[StateDescriptor]]]:
    """Iterate over the jobs that readers see, with their states."""
    log = ChangeLog(root)
    for name in log.jobs():
        job = log.job(name)
        generation = job.visible()
        if generation is not None:
            yield name, job.description(generation.generation).states


def states_of_server(server: Client) -> Iterator[AnalyzedState]:
    """Iterate over the states of a server, or of a proxy without an upstream; ClientError."""
    server.call("HELLO", "3")
    if "upstream_status:" in str(server.call("INFO", "proxy")):
        raise ClientError(f"{server.address} is a proxy with an upstream, which hides what states have: name a server")
    for job in server.call("STATE", "JOBS"):
        formats = dict(zip(job["state_names"], job["key_formats"], strict=True))
        for state in server.call("STATE", "LIST", job["name"]):
            yield AnalyzedState(
                f"{job['name']}:{state['name']}", formats[state["name"]], TYPE_NAMES[Kind(state["kind"])]
            )


def compare(server: Client, rows: Sequence[AnalyzedKeys]) -> None:
    """Count the samples that the server does not have, for each row of keys that states may own."""
    for row in rows:
        if row.owner is Owner.UPSTREAM or (row.rule is not None and row.rule.alias is not None):
            continue
        row.compared = len(row.samples)
        row.absent = row.compared - sum(server.call("EXISTS", sample.name) for sample in row.samples)
