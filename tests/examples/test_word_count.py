"""The example that attaches to a word count reads what the words come to, paragraph by paragraph."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.example import run

pytestmark = pytest.mark.spark

TEXT = """The cat sat on the mat; the dog sat too.

The mat was the cat's. A dog is no cat.

On and on and on.
"""


@pytest.mark.slow
def test_reader_sees_most_counted_words_after_each_paragraph(tmp_path: Path):
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    first, *lines = run("word_count", "--text", str(book), "--top", "6")
    assert re.search(r"redis-cli -p \d+ GET words:count:", first)
    counts: Counter[str] = Counter()
    expected = []
    for number, paragraph in enumerate(TEXT.split("\n\n"), 1):
        counts.update(re.findall("[a-z]+", paragraph.lower()))
        most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:6]
        expected.append(f"after paragraph {number}: " + ", ".join(f"{word} {count}" for word, count in most))
    assert lines == expected


def test_help_of_word_count_needs_no_spark():
    assert "redis" in " ".join(run("word_count", "--help", JAVA_HOME="/nowhere")).lower()
