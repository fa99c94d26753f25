"""Every line of `deviations.toml` names a difference that exists; a line about an old difference fails."""

from __future__ import annotations

import pytest

from compat.conformance.judge import BytesDeviation, Deviations, ReplyDeviation, has_text
from compat.conformance.pair import Pair
from compat.conformance.wire import exchange

LONG_PATTERN = b"<a pattern of 5000 bytes>"


@pytest.mark.parametrize("answer", Deviations.load().reply_deviations, ids=lambda answer: " ".join(answer.request))
def test_listed_deviation_is_real(pair: Pair, locked_pair: Pair, answer: ReplyDeviation) -> None:
    chosen = locked_pair if answer.is_password_set else pair
    words = [b"x" * 5000 if word.encode() == LONG_PATTERN else word.encode() for word in answer.request]
    (theirs,), (ours,) = chosen.replies_to([words])
    assert has_text(answer.redis, theirs), theirs.raw
    assert has_text(answer.sparkis, ours), ours.raw
    assert theirs.raw != ours.raw


@pytest.mark.parametrize("answer", Deviations.load().bytes_deviations, ids=lambda answer: repr(answer.data))
def test_listed_deviation_of_bytes_is_real(pair: Pair, locked_pair: Pair, answer: BytesDeviation) -> None:
    chosen = locked_pair if answer.is_password_set else pair
    theirs, ours = (exchange(server.port, answer.data.encode()) for server in (chosen.redis, chosen.sparkis))
    assert (theirs, ours) == (answer.redis.encode(), answer.sparkis.encode())
    assert theirs != ours
