"""The comparison of a program's outcomes, and the intended differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compat.swap_programs.outcomes import LIMITS, Limit, Result, limits
from compat.swap_programs.programs import PROGRAMS
from compat.swap_programs.suites import outcomes_in, outcomes_of_mocha
from compat.swap_programs.table import tables

RESULT = Result("redis-cli", {"get": "1", "--rdb": "bytes", "keys": 3}, {"get": "1", "--rdb": "an error", "more": 1})
RDB = Limit("redis-cli", ("--r*",), "not through the proxy")


def test_checks_differ_by_their_outcome_or_if_one_address_lacks_them() -> None:
    assert RESULT.different == ["--rdb", "keys", "more"]


def test_check_that_fails_at_redis_alone_is_broken() -> None:
    assert Result("RQ", {"a": {"error": "no worker"}, "b": 1}, {"a": {"error": "no worker"}, "b": 1}).broken == ["a"]


def test_limit_covers_its_programs_checks_only() -> None:
    assert RESULT.unexplained([RDB]) == ["keys", "more"]
    assert RESULT.unexplained([Limit("RQ", ("*",), "another program")]) == RESULT.different


def test_limit_without_difference_is_not_needed() -> None:
    assert RESULT.unneeded([RDB, Limit("redis-cli", ("get", "keys"), "one of two")]) == ["get"]
    assert RESULT.unneeded([Limit("RQ", ("*",), "another program")]) == []


def test_test_that_fails_at_redis_alone_is_not_compared() -> None:
    result = Result("suite", {"new": "failed", "get": "passed"}, {"new": "passed", "get": "failed"})
    assert result.compared == result.different == ["get"]


def test_each_limit_names_program() -> None:
    assert {each.program for each in limits()} <= {each.name for each in PROGRAMS}


def test_limit_with_wrong_field_is_error_that_names_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(LIMITS.read_text().replace("reason =", "because =", 1))
    with pytest.raises(ValueError, match=r"limits\.toml: a limit has program, checks and reason"):
        limits(path)


def test_tables_count_equal_checks() -> None:
    cli, pipe = PROGRAMS[:2]
    alike = Result(pipe.name, {"a": 1}, {"a": 1})
    text = tables([(pipe, alike), (cli, RESULT)], [RDB])
    rows = [line.split(" | ")[-2:] for line in text.splitlines()[2:4]]
    assert rows == [["3", "1 |"], ["1", "✓ |"]]
    assert "| redis-cli | `--r*` | not through the proxy |" in text


def test_rows_of_programs_that_were_not_run_are_kept() -> None:
    cli, pipe, *_, last = PROGRAMS
    former = tables([(cli, RESULT), (pipe, RESULT), (last, RESULT)], [RDB])
    text = tables([(pipe, Result(pipe.name, {"a": 1}, {"a": 1}))], [], former)
    rows = text.splitlines()[2:5]
    assert [rows[0], rows[2]] == former.splitlines()[2:5:2] and rows[1].endswith("| 1 | ✓ |")
    assert "`--r*`" not in text


def test_failed_teardown_fails_its_case_and_skipped_cases_are_left_out() -> None:
    cases = '<testcase classname="a.B" name="one"/><testcase classname="a.B" name="two"><error/></testcase>'
    cases += '<testcase classname="a" name="three"><skipped/></testcase>'
    report = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    assert outcomes_in(report) == {"a.B::one": "passed", "a.B::two": "failed"}


def test_mocha_outcomes_number_equal_titles_and_leave_out_skipped(
    tmp_path: Path,
) -> None:
    def row(title: str, error: str = "", suite: str = "suite ", **more: int) -> dict[str, object]:
        err = {"message": error} if error else {}
        return {"file": str(tmp_path / "a.ts"), "title": title, "fullTitle": suite + title, "err": err, **more}

    tests = [row("one", duration=3), row("one", "no"), row("two")]
    hooks = [row('"before all" hook for "three"', "ACL"), row('"after each" hook for "four"', "late", suite="")]
    hooks.append({"title": '"after all" hook', "fullTitle": '"after all" hook', "err": {"message": "no server"}})
    assert outcomes_of_mocha(json.dumps({"tests": tests, "failures": [tests[1], *hooks]}), tmp_path) == {
        "a.ts: suite one": "passed",
        "a.ts: suite one (2)": "failed",
        'a.ts: suite "before all" hook for "three"': "failed",
        'a.ts: "after each" hook for "four"': {"error": "late"},
        '"after all" hook': {"error": "no server"},
    }
