"""The newest epoch that all servers have is the common epoch while no server can read the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.servers.outages import CommonEpoch, Outages, newest_common
from resp_server.session.epochs import epochs_in, epochs_text

EPOCHS = st.tuples(st.integers(0, 2), st.integers(0, 4))


@given(st.lists(st.lists(EPOCHS, max_size=8), max_size=4))
def test_newest_common_epoch_is_last_that_each_server_has(
    servers: list[list[tuple[int, int]]],
) -> None:
    found = newest_common(servers)
    shared = [each for each in (servers[0] if servers else []) if all(each in some for some in servers)]
    assert found == max(shared, default=None)


@given(EPOCHS, EPOCHS, EPOCHS)
def test_servers_at_common_epoch_count_as_if_they_had_newest(
    held: tuple[int, int], newest: tuple[int, int], other: tuple[int, int]
) -> None:
    outages = Outages({"j": CommonEpoch(held, newest)})
    assert outages.counted("j", held) == newest
    assert outages.readable("j", newest) == held
    assert outages.counted("k", other) == outages.readable("k", other) == other
    if other not in (held, newest):
        assert outages.counted("j", other) == outages.readable("j", other) == other


@given(st.lists(EPOCHS))
def test_epochs_are_one_word(epochs: list[tuple[int, int]]) -> None:
    assert epochs_in(epochs_text(epochs)) == epochs
