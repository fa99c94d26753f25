"""The swap: an app keeps its one Redis address, while the keys that a job copies into Redis become the job's own state.

    python examples/swap.py          check, proxy, compare, switch; Redis dies twice; the old copies are deleted
    python examples/swap.py --back   instead of the deletion, the way back: the app is at its Redis again

It needs redis-server. A job counts the requests of each account. A second query of it copies the counts into Redis, as
before the swap. The app reads them all the time, beside a list of its own, and checks each reply: a count must not go
back, and the list has each event once.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from local import add_file, spark, temporary_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from redis.backoff import NoBackoff
from redis.retry import Retry

import sparkis

SPARKIS = [sys.executable, "-m", "sparkis"]
HOST = "127.0.0.1"
KEYS = "dash/<account>/requests"
ACCOUNTS = 5
REQUESTS = 200
STEP_S_MAX = 120.0
READS_MIN = 200


class WrongError(Exception):
    """The app has read what it must not read, or a step did not do what it is for."""


class App(threading.Thread):
    """The app: it reads all counts, and appends an event to a list of its own, again and again.

    problems: wrong counts, failed reads. may_miss: Redis answers the reads, and is down: failed reads are counted
    as missed, and are no problems. refused: appends that Redis did not get, so that the app tried them again.
    unknown: appends without a reply, so that the app looked whether they were done.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.may_miss = False
        self.reads = self.missed = self.events = self.refused = self.unknown = 0
        self.move(url)

    def move(self, url: str) -> None:
        """Use another address: all that a team changes."""
        # redis-py would send a write again whose reply was lost, and so do it twice.
        never = Retry(NoBackoff(), 0)
        with self._lock:
            self._reader = redis.Redis.from_url(url, decode_responses=True, retry=never)
            self._writer = redis.Redis.from_url(url, decode_responses=True, retry=never)

    def run(self) -> None:
        while not self._ends.wait(0.002):
            with self._lock:
                self._read()
                self._append()

    def end(self) -> None:
        """End the app."""
        self._ends.set()
        self.join()

    def _read(self) -> None:
        for account in range(ACCOUNTS):
            key = KEYS.replace("<account>", str(account))
            try:
                count = int(self._reader.get(key) or 0)
            except redis.RedisError as error:
                if self.may_miss:
                    self.missed += 1
                else:
                    self.problems.append(f"{key} was not readable: {error}")
                continue
            if count < self._counts[key]:
                self.problems.append(f"{key} went back from {self._counts[key]} to {count}")
            self._counts[key] = count
            self.reads += 1

    def _append(self) -> None:
        try:
            self._writer.rpush("events", self.events)
        except redis.ResponseError:  # TRYAGAIN: Redis did not get it
            self.refused += 1
        except redis.ConnectionError:
            self.unknown += 1
            self._look_after(self.events)
        else:
            self.events += 1

    def _look_after(self, event: int) -> None:
        """Find out whether an append was done that has no reply."""
        while not self._ends.wait(0.01):
            try:
                self.events += self._writer.lrange("events", -1, -1) == [str(event)]
                return
            except redis.RedisError:
                self._read()

    @property
    def counts(self) -> Counter[str]:
        """The counts that were read last, by key."""
        return Counter(self._counts)


def counted(session: SparkSession, requests: Path) -> DataFrame:
    """Return the number of requests of each account."""
    return session.readStream.schema("account string").json(str(requests)).groupBy("account").count()


def start_copy(session: SparkSession, folder: Path, url: str) -> StreamingQuery:
    """Start the query that copies counts into Redis; again, after it was stopped: it goes on at its checkpoint."""

    def copy(batch: DataFrame, number: int) -> None:
        rows = {f"dash/{row['account']}/requests": row["count"] for row in batch.collect()}
        if rows:
            redis.Redis.from_url(url).mset(rows)

    writer = counted(session, folder / "requests").writeStream.outputMode("update").foreachBatch(copy)
    return writer.queryName("copy").option("checkpointLocation", str(folder / "copy")).start()


def start_job(session: SparkSession, folder: Path) -> StreamingQuery:
    """Start the query whose state is readable under the same keys."""
    log = str(folder / "log")
    counts = counted(session, folder / "requests")
    writer = sparkis.queryable(counts, "requests", key_format=KEYS, value="count", mode="update", log=log)
    return writer.queryName("dash").option("checkpointLocation", str(folder / "dash")).start()


class Traffic:
    """Requests of accounts, as files. counts: the right counts, by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._random = random.Random(1)
        self._files = 0
        self.counts: Counter[str] = Counter()
        folder.mkdir()

    def add(self) -> None:
        """Add some requests."""
        accounts = [self._random.randrange(ACCOUNTS) for _ in range(REQUESTS)]
        self.counts.update(f"dash/{account}/requests" for account in accounts)
        add_file(self._folder / f"{self._files}.json", "".join(f'{{"account": "{each}"}}\n' for each in accounts))
        self._files += 1


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    ends_s = time.monotonic() + STEP_S_MAX
    while not is_so():
        if time.monotonic() > ends_s:
            raise WrongError(f"{what}: not after {STEP_S_MAX:.0f} s")
        time.sleep(0.05)


def run_sparkis(*words: str) -> str:
    """Run a `sparkis` command, and return what it prints."""
    done = subprocess.run([*SPARKIS, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongError(done.stderr.strip())
    return done.stdout


@contextmanager
def running(*line: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during a `with` block."""
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def answers(url: str) -> bool:
    """Return whether a server answers about keys."""
    try:
        return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)).exists("events") >= 0
    except redis.RedisError:
        return False


class Story:
    """The steps of the swap, in their order."""

    def __init__(self, session: SparkSession, folder: Path, stack: ExitStack) -> None:
        self._session, self._folder, self._stack = session, folder, stack
        self._redis_port = free_port()
        self._redis = f"redis://{HOST}:{self._redis_port}"
        self._rules = folder / "routes.toml"
        self._traffic = Traffic(folder / "requests")

    def before(self) -> None:
        """Start what the team has: Redis, the job with its copy, and the app."""
        self._traffic.add()
        self._start_redis()
        self._copy = start_copy(self._session, self._folder, self._redis)
        self._job = start_job(self._session, self._folder)
        self._copy.processAllAvailable()
        self._job.processAllAvailable()
        self.app = App(self._redis)
        self.app.start()
        self._until_right("the app reads the copies")

    def _start_redis(self) -> None:
        (self._folder / "redis").mkdir(exist_ok=True)
        # What Redis has said OK to survives its death.
        durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning")
        place = ("--bind", HOST, "--port", str(self._redis_port), "--dir", str(self._folder / "redis"))
        self._server = self._stack.enter_context(running("redis-server", *place, *durable))
        until(lambda: answers(self._redis), "redis-server starts")

    def check(self) -> str:
        """Step 1: say whose keys are, and write the first rules."""
        words = ("--upstream", self._redis, "--log", str(self._folder / "log"), "--write-rules", str(self._rules))
        return run_sparkis("swap-check", *words)

    def put_proxy_in_between(self) -> None:
        """Step 2: serve the state and Redis at one address, and give it to the app. No reply changes."""
        self._endpoint = sparkis.serve(
            self._session,
            log=self._folder / "log",
            upstream=sparkis.Upstream(self._redis, ownership=self._folder / "owners.json", routes=self._rules),
        )
        self._proxy = self._stack.enter_context(self._endpoint).url
        until(lambda: answers(self._proxy), "the proxy starts")
        self.app.move(self._proxy)
        self._traffic.add()
        self._until_right("the app reads the copies through the proxy")

    def compare(self) -> None:
        """Step 3: let the proxy compare the replies of Redis with the state's."""
        # A job that is more than a second behind its copy is different, and counts would go back at the switch.
        self._job.processAllAvailable()
        until(lambda: self._rows("LAG")[0]["lag_epochs"] == 0, "the job's last epoch is readable")
        self._change_owner("upstream", "shadow")
        self._compare_some()
        self._lose_redis_before_the_switch()
        self._compare_some()

    def _compare_some(self) -> None:
        wanted = self._shadow()["equal"] + READS_MIN
        until(lambda: self._shadow()["equal"] >= wanted, "the proxy has compared enough")
        if self._shadow()["different"] or self._shadow()["missing_in_state"]:
            raise WrongError(f"the state is not the same as the copies: {self._shadow()}")

    def _lose_redis_before_the_switch(self) -> None:
        """Kill Redis while it answers all keys: the app misses some replies, as without a proxy, and no event."""
        self.app.may_miss = True
        self._server.kill()
        self._server.wait()
        until(lambda: self.app.missed, "the app misses Redis")
        self._start_redis()
        reads, events = self.app.reads, self.app.events
        until(lambda: self.app.reads > reads + READS_MIN and self.app.events > events, "the app reads and writes again")
        self.app.may_miss = False

    def switch(self) -> None:
        """Step 4: the state answers. Then the copy is stopped, and nobody misses it."""
        self._change_owner("shadow", "state")
        self._copy.processAllAvailable()
        self._copy.stop()
        self._traffic.add()
        self._until_right("the app reads the state")

    def lose_redis(self) -> None:
        """Kill Redis, let the app go on with the state's keys, and start Redis again."""
        self._server.kill()
        self._server.wait()
        reads = self.app.reads
        self._traffic.add()
        self._until_right("the app reads the state while there is no Redis")
        until(lambda: self.app.reads >= reads + READS_MIN, "the app reads without Redis")
        self._start_redis()
        events = self.app.events
        until(lambda: self.app.events > events + READS_MIN, "the app writes again")

    def delete_copies(self) -> str:
        """Delete the old copies in Redis."""
        return run_sparkis("swap-check", "--upstream", self._redis, "--delete-copies", "--yes", "--proxy", self._proxy)

    def go_back(self) -> None:
        """Start the copy again, wait until it has caught up, and give the app its old address."""
        self._copy = start_copy(self._session, self._folder, self._redis)
        self._copy.processAllAvailable()
        self.app.move(self._redis)
        self._traffic.add()
        self._until_right("the app reads the copies again")

    def end(self) -> None:
        """End the app and the proxy, and check what the app has seen."""
        self.app.end()
        self._endpoint.stop()
        events = redis.Redis.from_url(self._redis, decode_responses=True).lrange("events", 0, -1)
        if events != [str(number) for number in range(self.app.events)]:
            self.app.problems.append(f"of {self.app.events} events, Redis has {len(events)}")
        if self.app.problems:
            raise WrongError("; ".join(self.app.problems[:5]))

    def _until_right(self, what: str) -> None:
        until(lambda: self.app.counts == self._traffic.counts or self.app.problems, what)
        if self.app.problems:
            raise WrongError(f"{what}: {'; '.join(self.app.problems[:5])}")

    def _change_owner(self, before: str, after: str) -> None:
        text = self._rules.read_text()
        self._rules.write_text(text.replace(f'\nowner = "{before}"', f'\nowner = "{after}"'))
        run_sparkis("reload", "--url", self._proxy)

    def _shadow(self) -> dict[str, Any]:
        (row,) = self._rows("SHADOW")
        return row

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Return the reply to a `STATE` command of the proxy."""
        client = redis.Redis.from_url(self._proxy, decode_responses=True, protocol=3)
        rows: list[dict[str, Any]] = client.execute_command("STATE", name)
        return rows


def main() -> None:
    """Tell the story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--back", action="store_true", help="take the way back at the end, instead of deleting copies")
    options = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("swap: needs redis-server; Debian and Ubuntu: apt-get install redis-server")
    try:
        with temporary_folder() as folder, spark("swap") as session, ExitStack() as stack:
            tell(Story(session, folder, stack), goes_back=options.back)
    except WrongError as error:
        raise SystemExit(f"swap: {error}") from None


def tell(story: Story, *, goes_back: bool) -> None:
    """Take the steps one after the other, and print them."""
    story.before()
    print("before: the app reads copies in Redis, which the job writes there", flush=True)
    print(f"1. sparkis swap-check:\n\n{story.check()}", flush=True)
    story.put_proxy_in_between()
    print("2. the app has the proxy's address; Redis answers all keys", flush=True)
    story.compare()
    print('3. owner = "shadow": the state and the copies are equal', flush=True)
    print(f"Redis was killed and started: {story.app.missed} reads failed meanwhile, as at Redis itself", flush=True)
    story.switch()
    print('4. owner = "state": the state answers, and the copy is stopped', flush=True)
    story.lose_redis()
    print(
        f"Redis was killed: {story.app.refused} appends were tried again, {story.app.unknown} looked after", flush=True
    )
    if goes_back:
        story.go_back()
        print("the way back: the copy has caught up, and the app has its old address", flush=True)
    else:
        print(f"sparkis swap-check --delete-copies:\n\n{story.delete_copies()}", flush=True)
    story.end()
    print(
        f"{story.app.reads} reads, none of the state failed, none wrong; {story.app.events} events, each once",
        flush=True,
    )


if __name__ == "__main__":
    main()
