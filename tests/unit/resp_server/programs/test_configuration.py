"""Options from a file and from the environment: their precedence, mistakes, and the place of a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from resp_server.commands.config_rewrite import rewritten
from resp_server.settings.server import ROWS
from spark_hooks import cli
from spark_hooks.cli import COMMANDS, main

FILE = """\
loglevel = "warning"
maxclients = 100
[serve]
log = "a"
port = 1
bind = ["127.0.0.1", "::1"]
compact = false
[proxy]
port = 2
"""


@pytest.fixture(autouse=True)
def only_what_the_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARKIS_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sparkis.toml"
    path.write_text(FILE)
    return path


def parse(*words: object) -> dict[str, object]:
    command = next(each for each in COMMANDS if each.name == words[0])
    return vars(cli._parse(command, [str(word) for word in words[1:]]))


CLIENTS = ("ui", "top", "status", "health")


@pytest.mark.parametrize("program", CLIENTS)
def test_clients_take_endpoint_from_file_environment_and_options(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "sparkis.toml").write_text('url = "redis://file:1"\n[serve]\nlog = "a"\n')
    assert parse(program, "--config", path)["url"] == "redis://file:1"
    monkeypatch.setenv("SPARKIS_URL", "redis://environment:1")
    assert parse(program, "--config", path)["url"] == "redis://environment:1"
    assert parse(program, "--config", path, "--url", "redis://given:1")["url"] == "redis://given:1"


@pytest.mark.parametrize("program", CLIENTS)
def test_clients_use_tls_files_of_servers_only_with_url_of_tls(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKIS_TLS_CA_CERT_FILE", "ca.pem")
    options = parse(program)
    assert options["tls_ca_cert_file"] is None
    assert options["configuration"].origins["tls-ca-cert-file"] == "default"  # type: ignore[attr-defined]
    assert parse(program, "--url", "rediss://h")["tls_ca_cert_file"] == "ca.pem"
    assert parse(program, "--tls-ca-cert-file", "other.pem")["tls_ca_cert_file"] == "other.pem"


def test_client_options_with_another_meaning_are_not_shared_with_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"PORT": "1", "BIND": "10.0.0.1 10.0.0.2", "LOG": "/log", "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"SPARKIS_{name}", value)
    page, status, health = (parse(each) for each in ("ui", "status", "health"))
    assert (page["port"], page["bind"], status["driver_log"]) == (7380, "127.0.0.1", None)
    assert health["answer_timeout"] == 4.0
    monkeypatch.setenv("SPARKIS_PAGE_PORT", "80")
    assert parse("ui")["port"] == 80 and parse("ui", "--port", "81")["port"] == 81


def test_option_of_command_line_is_stronger_than_one_that_excludes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKIS_METRICS", "9379")
    assert parse("health")["metrics"].port == 9379  # type: ignore[attr-defined]
    assert parse("health", "--url", "redis://h")["metrics"] is None


def mistakes_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    with pytest.raises(SystemExit, match="2"):
        parse(*words)
    return capsys.readouterr().err.splitlines()


def test_command_line_overrides_environment_and_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKIS_PORT", "5")
    monkeypatch.setenv("SPARKIS_TIMEOUT", "6")
    options = parse("serve", "--config", file, "--timeout", "7")
    assert (options["port"], options["timeout"], options["maxclients"]) == (5, 7, 100)
    assert (options["log"], options["bind"], options["compact"]) == (["a"], ["127.0.0.1", "::1"], "no")
    assert options["loglevel"] == "warning"


def test_program_has_values_of_its_own_table(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKIS_CONFIG", str(file))
    assert parse("proxy")["port"] == 2
    assert parse("registry", "--log", "l")["port"] != 1


def test_values_of_option_that_may_be_repeated_are_not_joined(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("serve", "--config", file, "--log", "b", "--log", "c")["log"] == ["b", "c"]
    monkeypatch.setenv("SPARKIS_LOG", "d 'e f'")
    assert parse("serve", "--config", file)["log"] == ["d", "e f"]


def test_all_mistakes_are_reported_with_their_lines(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKIS_TIMEOUT", "soon")
    file.write_text('maxclients = 0\n[serve]\nprot = 1\n"port" = 70000\nlog = [1.5, true]\nprotected-mode = "maybe"\n')
    assert mistakes_of(capsys, "serve", "--config", file) == [
        f"sparkis serve: {file}:5: log: True is neither a text nor a number",
        f"sparkis serve: {file}:4: port: '70000' is not a port from 0 to 65535",
        f"sparkis serve: {file}:6: protected-mode: 'maybe' is none of yes, no",
        f"sparkis serve: {file}:1: maxclients: '0' is not a number of connections from 1 to 4294967295",
        "sparkis serve: SPARKIS_TIMEOUT: timeout: 'soon' is not a number of seconds from 0 to 2147483647",
        f"sparkis serve: {file}:3: prot is no option of sparkis serve (did you mean port?)",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [("port = ", "Invalid value (at "), ("a = 1\na = 2", "Cannot overwrite a value (at ")],
)
def test_invalid_toml_is_refused_with_reason(
    file: Path, text: str, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    (line,) = mistakes_of(capsys, "serve", "--config", file)
    assert line.startswith(f"sparkis serve: {file}: {mistake}")


def test_missing_configuration_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistakes_of(capsys, "serve", "--config", tmp_path / "x") == [
        f"sparkis serve: {tmp_path / 'x'}: No such file or directory"
    ]


def test_address_that_kubernetes_sets_is_no_port(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKIS_PORT", "tcp://10.0.0.1:7379")
    assert parse("serve", "--config", file)["port"] == 1


def test_help_is_printed_with_any_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("?")
    with pytest.raises(SystemExit, match="0"):
        parse("serve", "--config", file, "--help")
    assert "--config FILE" in capsys.readouterr().out


def test_check_finds_mistakes_of_all_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 7 values, no mistakes\n"
    file.write_text('x = 1\n[serv]\nport = 1\n["proxy"]\nport = -1\n')
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"sparkis config: {file}:5: port: '-1' is not a port from 0 to 65535",
        f"sparkis config: {file}:3: [serv] is no program that reads this file (did you mean serve?)",
        f"sparkis config: {file}:1: x is no option of any program",
    ]


def test_show_names_source_of_each_value_and_hides_passwords(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKIS_UPSTREAM", "redis://user:s3cret@cache")
    monkeypatch.setenv("SPARKIS_REQUIREPASS", "s3cret")
    monkeypatch.setenv("SPARKIS_LOG", "/a '/b c'")
    assert main(["config", "show", "serve", "--config", str(file), "--json"]) == 0
    text = capsys.readouterr().out
    shown = json.loads(text)
    assert "s3cret" not in text
    assert shown["upstream"] == {"value": "redis://user:***@cache", "from": "SPARKIS_UPSTREAM"}
    assert shown["port"] == {"value": "1", "from": f"{file}:5"}
    assert shown["maxclients"] == {"value": "100", "from": f"{file}:2"}
    assert shown["timeout"] == {"value": "0", "from": "default"}
    assert shown["log"] == {"value": "/a '/b c'", "from": "SPARKIS_LOG"}
    assert main(["config", "show", "servee"]) == 1
    assert capsys.readouterr().err.startswith("sparkis config: 'servee' is none of serve, ")


def test_every_setting_that_can_change_is_option() -> None:
    options = {action.option_strings[0].lstrip("-") for action in command("serve").parser()._actions}
    changing = {row.option for row in ROWS.values() if row.is_modifiable}
    assert "maxclients" in changing and changing <= options


def command(name: str) -> cli.Command:
    return next(each for each in COMMANDS if each.name == name)


NAMES = st.sampled_from(["port", "timeout", "notify-keyspace-events", "maxclients"])
VALUES = st.one_of(
    st.integers(-(2**63), 2**63).map(str),
    st.sampled_from(["yes", "no"]),
    st.text(max_size=9).map(lambda text: f"v{text}"),
)


@given(st.dictionaries(NAMES, VALUES), st.sampled_from(["serve", "proxy", "registry"]))
def test_rewritten_file_has_new_values_and_all_else_as_it_was(values: dict[str, str], table: str) -> None:
    before = tomlkit.parse(FILE).unwrap()
    text = rewritten(f"# first\n{FILE}# last\n", table, values)
    after = tomlkit.parse(text).unwrap()
    for name, value in values.items():
        found = after[table].pop(name)
        assert value == {True: "yes", False: "no"}.get(found, str(found)) if isinstance(found, bool) else str(found)
        before.get(table, {}).pop(name, None)
    if not after[table]:
        del after[table]
    before = {name: value for name, value in before.items() if value != {}}
    assert after == before
    assert text.startswith("# first\n")
    assert "# last" in text
