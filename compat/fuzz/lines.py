"""Line coverage of fuzz inputs, in the modules under test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Modules between a client's bytes and the store, and between the replies of a proxy's servers and its clients.
FUZZED = (
    *("resp_server/protocol", "resp_server/commands", "resp_server/acl", "resp_server/session"),
    *("resp_server/backends/overlay", "resp_server/backends/redis", "resp_server/backends/routing"),
    *("resp_server/backends/servers", "resp_server/backends/stores"),
    # A proxy's requests to an upstream.
    "resp_server/raw_replies",
    # The path of a request.
    "resp_server/client/connection.py",
    "resp_server/client/input.py",
    "resp_server/client/output.py",
    "resp_server/client/unfinished_reply.py",
    "resp_server/client/turn_scheduler.py",
    "resp_server/pipeline/admission.py",
    "resp_server/pipeline/batch.py",
    "resp_server/pipeline/batched.py",
    "resp_server/pipeline/effects.py",
    "resp_server/pipeline/error_replies.py",
    "resp_server/pipeline/immediate.py",
    "resp_server/pipeline/pipeline.py",
    "resp_server/pipeline/transactions.py",
    "resp_server/pipeline/exec_runner.py",
    "resp_server/pipeline/long_requests.py",
    "resp_server/push/deliveries.py",
    # State per client: tracking, subscriptions, watched keys, the slow log.
    "resp_server/push/tracking_table.py",
    "resp_server/serving/invalidation_sender.py",
    "resp_server/push/pubsub.py",
    "resp_server/push/message_bus.py",
    "resp_server/push/keyspace_notifications.py",
    "resp_server/pipeline/watch.py",
    "resp_server/push/monitor.py",
    "resp_server/metrics/slow_log.py",
    "resp_server/metrics/latency.py",
    "resp_server/metrics/process_stats.py",
    "resp_server/cluster/node_view.py",
    "state_backend/store/slot_view.py",
    "resp_server/cluster/replies.py",
)
# Modules in these folders that inputs do not reach, because they read options, files or a registry, or because only
# `sparkis swap-check` uses them.
NOT_FUZZED = {
    "resp_server/backends/overlay/rules_reload.py",
    "resp_server/backends/redis/tls.py",
    "resp_server/backends/routing/key_analysis.py",
    "resp_server/backends/routing/key_patterns_found.py",
    "resp_server/backends/routing/rule_overlaps.py",
    "resp_server/backends/routing/rules_file.py",
    "resp_server/backends/routing/rules_template.py",
    "resp_server/backends/routing/stale_copies.py",
    "resp_server/backends/servers/server_stores.py",
    "resp_server/backends/servers/topology_sources.py",
}

Line = tuple[str, int]
LINES_PER_CALL_MAX = 2_000


def files() -> list[Path]:
    """Return the files under test."""
    paths = [ROOT / name for name in FUZZED]
    modules = [path for each in paths for path in ([each] if each.suffix else sorted(each.glob("*.py")))]
    return [path for path in modules if path.relative_to(ROOT).as_posix() not in NOT_FUZZED]


def all_lines() -> set[Line]:
    """Return the lines of functions, without lines that run when a module is imported."""
    return {(str(path), line) for path in files() for line in _lines_in(path)}


def _lines_in(path: Path) -> Iterable[int]:
    codes = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        if code.co_flags & CO_OPTIMIZED:  # a function: neither a module nor the body of a class
            yield from _lines_of(code)


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}


class Tracer:
    """Traces lines of the fuzzed modules during a call; a function that is fully covered is not traced any more."""

    def __init__(self) -> None:
        self._names = {str(path) for path in files()}
        # The lines that were not reached yet; empty for files that are not under test.
        self._unreached: dict[CodeType, set[int]] = {}
        self.reached: set[Line] = set()

    def run(self, function: Callable[[], Any]) -> set[Line]:
        """Call a function; return the lines that are reached for the first time."""
        self.reached = set()
        sys.settrace(self._on_call)
        try:
            function()
        finally:
            sys.settrace(None)
        return self.reached

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        lines = self._unreached.get(code)
        if lines is None:
            lines = self._unreached[code] = _lines_of(code) if code.co_filename in self._names else set()
        return self._line_tracer(code, lines) if lines else None

    def _line_tracer(self, code: CodeType, lines: set[int]) -> Any:
        """Return the trace function of a call. Tracing ends with the last new line: some calls loop over all slots."""
        remaining, add, name = LINES_PER_CALL_MAX, self.reached.add, code.co_filename

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if event == "line" and frame.f_lineno in lines:
                lines.remove(frame.f_lineno)
                add((name, frame.f_lineno))
            frame.f_trace_lines = remaining > 0 and bool(lines)
            return on_line

        return on_line
