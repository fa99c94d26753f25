"""Ready replies by request: what was sent for a request is sent again while it holds.

A request is held as it was sent; what it begins with, up to the end of its key, is its *subject* (`protocol.wholes`).
Knows nothing of commands, epochs or sockets: its owner adds only what holds until the key is changed, and drops what
was changed before it looks at anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from resp_server.protocol.wholes import is_subject, subject_of

# What an entry costs beside its bytes (CPython 3.11: two object headers with malloc's rounding, and the dictionary's
# row at its usual filling), and what it costs more if it has to be found by its subject.
ENTRY_OVERHEAD_BYTES = 150
SUBJECT_OVERHEAD_BYTES = 300
# A longer reply is copied longer than it is looked up, and would push out many short ones (guess).
ENTRY_BYTES_MAX = 4096
# How many requests that are more than their subject may have the same one: it is dropped at once (guess).
REQUESTS_PER_SUBJECT_MAX = 16
# The part of a full cache that makes room, the oldest first, and how many of them at once at most: 1.5 us each
# (measured; mostly waiting for memory), and nobody is to wait for that.
ROOM_SHARE = 16
ROOM_ENTRIES_MAX = 1024

# A look that finds nothing costs about a third of what one that finds something saves (measured), so that a cache that
# hits less than this is a loss. It is judged when it has been asked this often, and often enough to have been filled.
HIT_SHARE_MIN = 0.25
JUDGED_AFTER_LOOKS = 1 << 16
JUDGED_AFTER_LOOKS_PER_ENTRY = 4
# A cache that is a loss is emptied and not asked, for a time that doubles with each try in vain.
REST_LOOKS = 1 << 20
REST_LOOKS_MAX = 1 << 26


class ReplyCache:
    """Replies by request, bounded in bytes. `bytes_max` 0: it holds nothing.

    `held` is for looking things up; whoever does so adds the number of look-ups to `looks`. While `is_held` is False it
    rests, and what is added is let go.
    """

    def __init__(self, bytes_max: int) -> None:
        self.held: dict[bytes, bytes] = {}
        self.looks = 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._heads: dict[bytes, None] = {}
        self._by_subject: dict[bytes, tuple[bytes, ...]] = {}  # requests that are more than their subject
        self._aside: list[dict[bytes, bytes] | dict[bytes, tuple[bytes, ...]]] = []
        self._aside_bytes = 0
        self._misses = 0
        self._rest_looks = REST_LOOKS
        self.is_held = bool(bytes_max)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def used_bytes(self) -> int:
        """About how much memory the replies and their requests take, those included that are yet to be freed."""
        return self._bytes + self._aside_bytes

    def add(self, head: bytes, replies: Mapping[bytes, bytes | None], missed: int) -> None:
        """Hold replies to requests that begin with `head`; `missed` were just not found.

        None, and long ones, are left out.
        """
        self._misses += missed
        if not self.is_held:
            self._free(missed * ENTRY_OVERHEAD_BYTES)
            self._rest()
            if not self.is_held:
                return
        self._heads[head] = None
        before_bytes = self._bytes
        held, has_subject = self.held, is_subject(head)
        for request, reply in replies.items():
            if reply is not None and request not in held:
                size = len(request) + len(reply)
                if size <= ENTRY_BYTES_MAX and (has_subject or self._link(request)):
                    held[request] = reply
                    self._bytes += size + ENTRY_OVERHEAD_BYTES
        self._free(self._bytes - before_bytes)
        if self._bytes > self._bytes_max:
            self._make_room()
        if self.looks >= JUDGED_AFTER_LOOKS:
            self._judge()

    def _link(self, request: bytes) -> bool:
        """Have a request found by its subject; False if that has enough of them."""
        subject = subject_of(request)
        others = self._by_subject.get(subject, ())
        if len(others) == REQUESTS_PER_SUBJECT_MAX:
            return False
        self._by_subject[subject] = (*others, request)
        self._bytes += SUBJECT_OVERHEAD_BYTES
        return True

    def drop(self, keys: Sequence[bytes] | None) -> None:
        """Let go of the replies to requests about these keys; None: of all."""
        if keys is None:
            self._put_aside()
            return
        texts = [b"%d\r\n%b\r\n" % (len(key), key) for key in keys]
        for head in self._heads:
            subjects = [head + text for text in texts]
            self._remove(self.held.keys() & subjects)
            for subject in self._by_subject.keys() & subjects:
                self._remove(self._by_subject[subject])

    def _remove(self, requests: Iterable[bytes]) -> None:
        for request in requests:
            self._bytes -= len(request) + len(self.held.pop(request)) + ENTRY_OVERHEAD_BYTES
            if not is_subject(request):
                subject = subject_of(request)
                others = tuple(each for each in self._by_subject.pop(subject) if each != request)
                if others:
                    self._by_subject[subject] = others
                self._bytes -= SUBJECT_OVERHEAD_BYTES

    def _put_aside(self) -> None:
        """Let go of everything. To free 300,000 entries at once would hold up the event loop for 15 ms (measured)."""
        self._aside += [each for each in (self.held, self._by_subject) if each]
        self._aside_bytes += self._bytes
        self.held, self._by_subject, self._bytes = {}, {}, 0

    def _free(self, size: int) -> None:
        """Free about as much of what was put aside as was just added, so that both take no more than one may."""
        while self._aside and size > 0:
            last = self._aside[-1]
            if not last:
                self._aside.pop()
                continue
            request, held = last.popitem()
            is_reply = isinstance(held, bytes)
            freed = len(request) + len(held) + ENTRY_OVERHEAD_BYTES if is_reply else len(held) * SUBJECT_OVERHEAD_BYTES
            self._aside_bytes -= freed
            size -= freed

    def _make_room(self) -> None:
        while self._bytes > self._bytes_max:
            self._remove(list(islice(self.held, min(1 + len(self.held) // ROOM_SHARE, ROOM_ENTRIES_MAX))))

    def _judge(self) -> None:
        """Look back once in a while at how often something was found, and go to rest if that was too seldom."""
        if self.looks < JUDGED_AFTER_LOOKS_PER_ENTRY * len(self.held):
            return
        if self.looks - self._misses < HIT_SHARE_MIN * self.looks:
            self._put_aside()
            self.is_held = False
        else:
            self._rest_looks = REST_LOOKS
        self.looks = self._misses = 0

    def _rest(self) -> None:
        if self._bytes_max and self.looks >= self._rest_looks:
            self.is_held = True
            self._rest_looks = min(2 * self._rest_looks, REST_LOOKS_MAX)
            self.looks = self._misses = 0
