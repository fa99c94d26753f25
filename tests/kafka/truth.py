"""What the state of a query over a topic should be, by an independent consumer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kafka.broker import Broker
from tests.kafka.scene import KEYS

# The count, sum and greatest number of each key, in order.
Facts = tuple[tuple[int, int, int], ...]
NO_FACTS: Facts = ((0, 0, 0),) * KEYS


class Truth:
    """What each of a query's batches should have, by its offsets in the checkpoint and an independent consumer."""

    def __init__(self, kafka: Broker, topic: str, checkpoint: Path) -> None:
        self._topic, self._checkpoint = topic, checkpoint
        # Of each partition: the key and the number of each message.
        self._messages: list[list[tuple[int, int]]] = [[] for _ in kafka.partitions(topic)]
        for message in kafka.messages(topic):
            self._messages[message.partition()].append((int(message.key()[1:]), int(message.value())))

    def of_topic(self) -> Facts:
        """Return the state after all messages."""
        return self._at_each([[len(messages) for messages in self._messages]])[0]

    def of_keys(self) -> list[set[tuple[int, int, int]]]:
        """Return all values that each key may have had: those after each of its messages. A key is in one partition."""
        found: list[set[tuple[int, int, int]]] = [{(0, 0, 0)} for _ in range(KEYS)]
        state = list(NO_FACTS)
        for messages in self._messages:
            for key, number in messages:
                count, total, _ = state[key]
                state[key] = count + 1, total + number, number
                found[key].add(state[key])
        return found

    def of_batches(self) -> list[Facts]:
        """Return the state at the end of each committed batch, in order; the first one is that before all batches."""
        batches = sorted(int(path.name) for path in (self._checkpoint / "commits").iterdir() if path.name.isdigit())
        assert batches[0] == 0, "Spark has removed the first batches"
        return self._at_each([[0] * len(self._messages), *map(self._ends, batches)])

    def _ends(self, batch: int) -> list[int]:
        (*_, offsets) = (self._checkpoint / "offsets" / str(batch)).read_text().splitlines()
        ends = json.loads(offsets)[self._topic]
        return [ends.get(str(partition), 0) for partition in range(len(self._messages))]

    def _at_each(self, places: list[list[int]]) -> list[Facts]:
        """Return the state at increasing offsets of all partitions."""
        state, found, before = list(NO_FACTS), list[Facts](), [0] * len(self._messages)
        for ends in places:
            for messages, begin, end in zip(self._messages, before, ends, strict=True):
                for key, number in messages[begin:end]:
                    count, total, _ = state[key]
                    state[key] = count + 1, total + number, number
            found.append(tuple(state))
            before = ends
        return found
