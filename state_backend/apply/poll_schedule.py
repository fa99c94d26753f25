"""When to look for the next epoch: the times between a job's epochs, learned from when they were found.

Announcements and events of folders are hints that may be lost or may never come, so an applier also looks by itself.
Without news the pause doubles up to a limit. Around the time at which the next epoch is expected, pauses are short:

    found      found            earliest       latest             twice the latest
    --|----------|------- pause ----|--short--short--short--short---|---- pause ----

    latest     the longest of the last gaps between two epochs
    earliest   the shortest of these gaps, less MARGIN * (longest - shortest)

An epoch was committed between the look that found it and the look before. So each gap is known as a shortest and a
longest possible one, and more exactly where looks are more frequent. A job whose gaps equal the pause is therefore not
always found equally late. Where epochs are announced, there is one look around the expected time, at its end: the
announcement may have been lost.
"""

from __future__ import annotations

import math
from collections import deque

# The gaps that are remembered: few, so that a change of a job is soon learned (guess).
GAPS = 8
# Nothing is expected from fewer gaps.
GAPS_MIN = 3
# The next gap may be shorter than all that are remembered (measured: with a smaller margin, a tenth of epochs that come
# at random is found at half of the difference).
MARGIN = 0.3
# The difference of the longest and the shortest gap has so many short pauses (guess).
LOOKS = 16


class PollSchedule:
    """The pauses between an applier's looks at the log, in seconds of any one clock.

    Args:
        first_s: The first pause after a look without news. Each later one is twice as long.
        longest_s: The limit of these pauses.
        shortest_s: The shortest pause around the time at which an epoch is expected.
    """

    def __init__(self, first_s: float, longest_s: float, shortest_s: float) -> None:
        self._first_s = self._pause_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._shortest_s = shortest_s
        self._gaps: deque[tuple[float, float]] = deque(maxlen=GAPS)  # the shortest and the longest that each may be
        self._looked_s = self._before_s = self._found_s = math.nan  # the last look; the last find, and the look before
        self._is_announced = False

    def note_look(self, now_s: float, *, has_news: bool, epochs: int, was_announced: bool) -> None:
        """Note a look that has ended now.

        Args:
            was_announced: A hint was its reason.
        """
        if epochs:
            before_s = now_s if was_announced else self._looked_s
            if not math.isnan(self._before_s):
                self._gaps.append(((before_s - self._found_s) / epochs, (now_s - self._before_s) / epochs))
            self._before_s, self._found_s, self._is_announced = before_s, now_s, was_announced
        self._looked_s = now_s
        if has_news and not was_announced:
            self._pause_s = self._first_s

    def note_pause(self) -> None:
        """Note that a pause has ended without a hint."""
        self._pause_s = min(2 * self._pause_s, self._longest_s)

    def pause_s(self, now_s: float) -> float:
        """Return how long to wait for a hint before the next look."""
        return min(self._pause_s, self._until_expected_s(now_s))

    def _until_expected_s(self, now_s: float) -> float:
        if len(self._gaps) < GAPS_MIN:
            return math.inf
        since_s = now_s - self._found_s
        shortest_gap_s, latest_s = min(each for each, _ in self._gaps), max(each for _, each in self._gaps)
        difference_s = latest_s - shortest_gap_s
        earliest_s = shortest_gap_s - MARGIN * difference_s
        if since_s >= 2 * latest_s:
            return math.inf
        if self._is_announced:
            return max(self._shortest_s, 2 * latest_s - since_s)
        if since_s < earliest_s:
            return max(self._shortest_s, earliest_s - since_s)
        return max(self._shortest_s, difference_s / LOOKS)
