"""The systemd units: their command lines are those of `sparkis`, and systemd finds nothing wrong with them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.unit.deploy.command_lines import DEPLOY, WrongCommandLineError, options_of

FOLDER = DEPLOY / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
PROGRAM = "/opt/sparkis/bin/sparkis"
# Of 100; systemd calls up to 20 "OK".
EXPOSURE_MAX = 15

analyze = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.expected_skip(analyze is None, reason="needs systemd-analyze, of systemd")


def settings_of(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit: (name, values in order). An empty value removes the earlier ones."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (FOLDER / name).read_text().splitlines():
        if line and line[0] not in "#[":
            setting, _, value = line.partition("=")
            found[setting] = [*found[setting], value] if value else []
    return found


def command_of(name: str) -> list[str]:
    """Return the words of a unit's command, with the values of its own variables."""
    (command,) = settings_of(name)["ExecStart"]
    unit = "sparkis-proxy.service" if name.endswith(".conf") else name
    variables = dict(each.split("=") for line in settings_of(unit)["Environment"] for each in shlex.split(line))
    text = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], command)
    return shlex.split(text.replace("%i", "1").replace("%H", "host-1"))


@pytest.mark.parametrize("name", [*UNITS, "sparkis-proxy-upstream.conf"])
def test_unit_starts_command_that_exists_with_options_that_exist(name: str) -> None:
    program, *words = command_of(name)
    assert program == PROGRAM
    options = options_of(words)
    assert "/srv/sparkis/log" in options.log


def test_missing_option_is_noticed() -> None:
    with pytest.raises(WrongCommandLineError, match="--livez"):
        options_of(["serve", "--log", "/log", "--livez", "1"])


@pytest.mark.parametrize("name", UNITS)
def test_unit_listens_on_loopback_by_default(name: str) -> None:
    options = options_of(command_of(name)[1:])
    assert options.bind in ("127.0.0.1", ["127.0.0.1"]) and options.metrics.host == "127.0.0.1"


def test_units_of_one_machine_have_ports_of_their_own() -> None:
    ports = [options_of(command_of(name)[1:]).metrics.port for name in UNITS]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("name", UNITS)
def test_folder_of_server_is_one_that_its_unit_makes(name: str) -> None:
    options, made = options_of(command_of(name)[1:]), settings_of(name)["StateDirectory"]
    store = getattr(options, "store", None)
    assert [f"/var/lib/{each.replace('%i', '1')}" for each in made] == [store or "/var/lib/sparkis/proxy"] or (
        made == [] and name == "sparkis-registry.service"
    )


@pytest.mark.parametrize("name", UNITS)
def test_secrets_are_in_file_that_has_example(name: str) -> None:
    (file,) = settings_of(name)["EnvironmentFile"]
    example = (FOLDER / (Path(file.removeprefix("-")).name + ".example")).read_text()
    known = {"SPARKIS_PASSWORD", "SPARKIS_CONTROL_TOKEN", "SPARKIS_SERVER_PASSWORD", "SPARKIS_UPSTREAM"}
    assert set(re.findall(r"^(?:# )?(\w+)=", example, re.MULTILINE)) <= known


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_no_mistake_in_unit(name: str, tmp_path: Path) -> None:
    # systemd checks that the program is there.
    unit = tmp_path / name.replace("@", "@1")
    unit.write_text((FOLDER / name).read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run([str(analyze), "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if line.startswith(("sparkis", str(tmp_path)))] == []
    assert done.returncode == 0, done.stderr


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_unit_is_hardened_by_systemds_own_score(name: str) -> None:
    done = subprocess.run(
        [str(analyze), "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(FOLDER / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd-analyze security --offline, of systemd 250")
    assert done.returncode == 0, done.stdout + done.stderr


def test_units_are_hardened_alike() -> None:
    hardening = [(FOLDER / name).read_text().partition("# A server reads the log")[2] for name in UNITS]
    assert hardening[0] and set(hardening) == {hardening[0]}
