"""The growth of the fuzzing process, by libFuzzer's progress lines."""

from __future__ import annotations

import pytest

from compat.fuzz.__main__ import growth_and_end

OUTPUT = """
#2	INITED cov: 100 ft: 200 corp: 2/10b exec/s: 0 rss: 200Mb
#512	NEW    cov: 120 ft: 210 corp: 3/12b lim: 4 exec/s: 20 rss: 260Mb L: 2/2 MS: 1 CMP-
{pulse}
found: compat/fuzz/found/one
#2000	DONE   cov: 120 ft: 210 corp: 3/12b lim: 4 exec/s: 20 rss: 290Mb
"""


@pytest.mark.parametrize(("pulse", "growth"), [("", 30), ("#1000	pulse  cov: 120 exec/s: 20 rss: 285Mb", 5)])
def test_growth_is_that_of_second_half_of_inputs(pulse: str, growth: int) -> None:
    assert growth_and_end(OUTPUT.format(pulse=pulse)) == (growth, 290)


def test_process_without_progress_has_not_grown() -> None:
    assert growth_and_end("it did not start") == (0, 0)
