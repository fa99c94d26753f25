"""Programs that come with redis-server, at that server alone and through a proxy with an upstream.

`make programs` runs these and others, with more requests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from compat.swap_programs.outcomes import Outcomes, Result, limits
from compat.swap_programs.targets import Target, Targets, running_targets
from compat.swap_programs.tools import piped, redis_benchmark, redis_cli

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli on the PATH")


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with running_targets() as targets:
        yield targets
        assert targets.reads.count
        assert not targets.reads.wrong


def benchmark(target: Target) -> Outcomes:
    return redis_benchmark(target, count=200)


@pytest.mark.parametrize(
    ("name", "run"), [("redis-cli", redis_cli), ("redis-cli --pipe", piped), ("redis-benchmark", benchmark)]
)
def test_redis_programs_have_equal_results_at_both_addresses(targets: Targets, name: str, run: object) -> None:
    assert callable(run)
    result = Result(name, run(targets.alone), run(targets.swapped))
    differences = {each: (result.alone.get(each), result.swapped.get(each)) for each in result.unexplained(limits())}
    assert not differences
    assert not result.unneeded(limits())
