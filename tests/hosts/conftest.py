"""Tests on hosts of their own: `make test-hosts` runs a selection, `make test-hosts ARGS=--whole` all faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Network, missing
from tests.hosts.scene import SELECTION, WHOLE, WITH_SPARK, Scene
from tests.hosts.world import World

HERE = Path(__file__).parent
STORE_TESTS = HERE / "test_object_store.py"
# These are not in the selection.
WHOLE_TESTS = {STORE_TESTS, HERE / "test_pods.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses all faults."""
    parser.addoption("--whole", action="store_true", help="all faults, with a Spark job; writes docs/reliability.md")
    parser.addoption("--without-spark", action="store_true", help="with --whole: four servers, and no Spark job")
    parser.addoption("--rounds", type=int, default=1, metavar="N", help="run all faults N times")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not in the selection."""
    return True if collection_path in WHOLE_TESTS and not config.getoption("--whole", False) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the faults, in rounds."""
    if "fault" not in metafunc.fixturenames:
        return
    is_whole, rounds = metafunc.config.getoption("--whole", False), metafunc.config.getoption("--rounds", 1)
    faults = [fault for fault in metafunc.module.FAULTS if fault.is_selected or is_whole]
    names = [f"{fault.name}, round {number}" if number else fault.name for number in range(rounds) for fault in faults]
    metafunc.parametrize("fault", faults * rounds, ids=names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip these tests where no hosts can be made."""
    reason = missing() if "hosts" in config.option.markexpr else ""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.expected_skip(bool(reason), reason=reason))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """The scene of a module's faults; with `--whole` its table is written when all have happened."""
    is_whole, has_store = request.config.getoption("--whole"), request.path == STORE_TESTS
    has_spark = is_whole and not has_store and not request.config.getoption("--without-spark")
    folder = tmp_path_factory.mktemp("world")
    with Network(tmp_path_factory.mktemp("network")) as network, pytest.MonkeyPatch.context() as patch:
        servers = 6 if has_spark else 4
        world = World(folder, network, servers=servers, replicas=1, has_spark=has_spark, has_store=has_store)
        for name, text in world.variables.items():
            patch.setenv(name, text)
        made = Scene(world, WITH_SPARK if has_spark else WHOLE if is_whole else SELECTION)
        yield made
        made.stop()
        if is_whole and [*made.rows] == [fault.name for fault in request.module.FAULTS]:
            made.write_page()
