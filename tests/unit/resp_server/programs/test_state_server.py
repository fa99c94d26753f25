"""The options of a state server, and its record of its identity."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from resp_server.programs.state_server import Identity, add_options
from resp_server.registry.registry_file import FencedError, RegistryFile, RegistryLease, read_registry_file
from resp_server.registry.report import Report, ReportError
from resp_server.serving.applier_process import Visible
from resp_server.serving.token import token_of
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import LogCorruptError
from state_backend.model.slot_set import SlotSet


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["--log", "log", *words])


@pytest.mark.parametrize(("text", "ports"), [("7400-7402", [7400, 7401, 7402]), ("7400", [7400]), ("0", [0])])
def test_ports_are_range_or_one(text: str, ports: list[int]) -> None:
    assert list(parse("--ports", text).ports) == ports


@pytest.mark.parametrize("text", ["", "-", "7402-7400", "a-b", "1-70000", "-5"])
def test_ports_that_cannot_be_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--ports={text}")
    assert "is no range of ports: write first-last" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "advertised"),
    [
        ("10.0.0.1", ("10.0.0.1", None)),
        ("host.example:7400", ("host.example", 7400)),
        ("fe80::1", ("fe80::1", None)),
        ("2001:db8::12", ("2001:db8::12", None)),
        ("[2001:db8::12]", ("2001:db8::12", None)),
        ("[fe80::1]:7400", ("fe80::1", 7400)),
    ],
)
def test_advertised_address_has_port_or_not(text: str, advertised: tuple[str, int | None]) -> None:
    assert parse("--advertise", text).advertise == advertised


@pytest.mark.parametrize("text", ["", "[]", "host:", "host:0", "host:70000", "fe80::1]:x"])
def test_advertised_address_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        parse("--advertise", text)


def test_server_keeps_its_identity(tmp_path: Path) -> None:
    new = Identity.of(tmp_path)
    assert Identity.of(tmp_path) != new
    known = Identity(new.id, 7400, SlotSet.parse("0-99,200"))
    known.write(tmp_path)
    assert Identity.of(tmp_path) == known
    (tmp_path / "member.json").write_text('{"id": "short"')
    assert Identity.of(tmp_path).port == 0


def test_token_comes_from_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARKIS_CONTROL_TOKEN", raising=False)
    with pytest.raises(ValueError, match="there is no token"):
        token_of(parse())
    (tmp_path / "token").write_text("of the file\n")
    monkeypatch.setenv("SPARKIS_CONTROL_TOKEN", "of the environment")
    assert token_of(parse("--token-file", str(tmp_path / "token"))) == "of the file"
    monkeypatch.setenv("SPARKIS_CONTROL_TOKEN", "of the environment")
    assert token_of(parse()) == "of the environment"


def test_registry_of_higher_term_stays(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path)
    first = RegistryLease.acquire(filesystem, "a:1", 0)
    first.renew(None)
    second = RegistryLease.acquire(filesystem, "b:2", 1)
    second.renew(None)
    with pytest.raises(FencedError, match="at b:2, has taken over with term 2; this one has 1"):
        first.renew(None)
    assert read_registry_file(filesystem) == second.record == RegistryFile(2, "b:2", 1)
    filesystem.remove("registry.json")
    second.renew(None)  # somebody removed it: it is written again
    assert read_registry_file(filesystem) == second.record


def test_two_registries_of_one_term_differ_by_their_addresses(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path)
    first = RegistryLease.acquire(filesystem, "a:1", 0)
    filesystem.replace("registry.json", RegistryFile(1, "b:2", 0).to_bytes())
    with pytest.raises(FencedError):
        first.renew(None)
    filesystem.replace("registry.json", b"[]")
    with pytest.raises(LogCorruptError, match=r"registry\.json is not a registry's record"):
        read_registry_file(filesystem)


def test_report_is_read_back() -> None:
    report = Report("0" * 40, "host", 7400, True, False, 3, SlotSet.parse("1-5"))
    assert Report.parse(report.to_json()) == report
    report = replace(
        report, jobs={"job": Visible("g", 1, 2, 3, "/log")}, logs={"/log": "id", "/more": "", "/far": None}
    )
    assert Report.parse(report.to_json()) == report


def test_reports_of_other_versions_are_accepted() -> None:
    report = Report("0" * 40, "host", 7400, jobs={"job": Visible("g", 1, 2, 3, "/log")}, logs={"/log": "id"})
    content = json.loads(report.to_json())
    # An older registry reads these fields, and ignores all others.
    older = {name: content[name] for name in ("id", "host", "port", "is_draining", "has_room", "topology_version")}
    older |= {"owned_slots": content["owned_slots"], "zone": content["zone"], "driver": content["driver"]}
    older["jobs"] = {"job": {name: content["jobs"]["job"][name] for name in ("generation", "term", "epoch")}}
    assert Report.parse(json.dumps(older)) == replace(report, jobs={"job": Visible("g", 1, 2)}, logs={})
    assert Report.parse(json.dumps(content | {"of_a_newer_version": 1})) == report


def test_invalid_report_is_refused() -> None:
    with pytest.raises(ReportError, match="not a report of a state server"):
        Report.parse("{}")
