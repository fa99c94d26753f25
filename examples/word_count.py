"""Attach to a job that does not use sparkis: the word count of every introduction to Spark.

    python examples/word_count.py
    python examples/word_count.py --text BOOK.txt --top 20

Spark stores the counts in the state of the job's query. An attachment makes them readable with any Redis client:
`GET words:count:nation`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import redis
from local import add_file, spark, temporary_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis

# Abraham Lincoln, the Gettysburg Address, 1863.
SPEECH = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can
long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a
final resting place for those who here gave their lives that that nation might live. It is altogether fitting and
proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave
men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract.
"""


def word_count(session: SparkSession, lines: Path) -> DataFrame:
    """Return the words of text files with their counts."""
    words = F.explode(F.split(F.lower("value"), "[^a-z]+"))
    return session.readStream.text(str(lines)).select(words.alias("word")).where("word != ''").groupBy("word").count()


def main() -> None:
    """Process each paragraph as a micro-batch, and read the counts after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text to count (default: a short speech)")
    parser.add_argument(
        "--top",
        type=int,
        default=5,
        metavar="N",
        help="the number of most frequent words to print (default %(default)d)",
    )
    options = parser.parse_args()
    text = options.text.read_text() if options.text else SPEECH

    with temporary_folder() as folder, spark("word count") as session:
        lines = folder / "lines"
        lines.mkdir()
        query = (
            word_count(session, lines)
            .writeStream.outputMode("update")
            .format("noop")
            .queryName("words")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .start()
        )
        paragraphs = [each for each in text.split("\n\n") if each.strip()]
        add_file(lines / "0.txt", paragraphs[0])
        query.processAllAvailable()

        # From here on with sparkis: a server, and an attachment to the running query.
        with sparkis.serve(session, log=folder / "log") as endpoint, sparkis.attach(query, state="count") as attached:
            client = redis.Redis.from_url(endpoint.url, decode_responses=True)
            print(f"the counts are at {endpoint.url}; for example: redis-cli -p {endpoint.port} GET words:count:nation")
            for number, paragraph in enumerate(paragraphs):
                if number:
                    add_file(lines / f"{number}.txt", paragraph)
                    query.processAllAvailable()
                attached.wait()
                print(f"after paragraph {number + 1}:", _most(client, options.top))


def _most(client: redis.Redis, count: int) -> str:
    """Return the most frequent words with their counts, as text."""
    keys = list(client.scan_iter("words:count:*", count=1000))
    found = dict(zip(keys, map(int, client.mget(keys)), strict=True))
    most = sorted(found, key=lambda key: (-found[key], key))[:count]
    return ", ".join(f"{key.rpartition(':')[2]} {found[key]}" for key in most)


if __name__ == "__main__":
    main()
