"""GEO: searches anywhere on earth find, order and write the members that Redis does; scores are those of GEOADD."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from compat.conformance.generators import checked
from compat.conformance.pair import Pair
from compat.conformance.servers import redis_server
from compat.conformance.wire import Words, replies_to
from state_backend.codec.geohash import LATITUDE_MAX, LONGITUDE_MAX, score_of

LINES = [
    "GEOPOS geo:cities Palermo nope Suva",
    "GEOPOS geo:odd a b c d e f",
    "GEOPOS missing a",
    "GEOPOS geo:many",
    "GEOHASH geo:cities Palermo nope Svalbard",
    "GEOHASH geo:odd a b c d e f",
    "GEODIST geo:cities Palermo Catania",
    "GEODIST geo:cities Palermo Palermo Mi",
    "GEODIST missing a b cm",
    "GEODIST plain a b cm",
    "GEODIST geo:cities Palermo nope km km",
    "GeoSearch geo:many FROMLONLAT 15 37 FROMLONLAT 1 2 COUNT 1",
    "geoSEARCH missing BYRADIUS 1 km BYRADIUS 1 km",
    "GEOSEARCH geo:many FROMLONLAT 0 0 BYBOX inf inf km",
    "GEOSEARCH geo:many FROMLONLAT 0 0 BYRADIUS inf km COUNT 5 DESC",
    "GEOSEARCH geo:odd FROMMEMBER b BYRADIUS 40000 km WITHDIST WITHHASH WITHCOORD",
    "GEOSEARCH missing FROMMEMBER nope BYRADIUS 1 km ANY",
    "GEOSEARCH plain FROMMEMBER a BYRADIUS 40000 km nope",
    "GEORADIUS_RO geo:near 13.36 38.15 3 km STORE x",
    "GEORADIUS_RO missing 13.36 38.15 3 cm",
    "GEORADIUSBYMEMBER_RO missing nope 200 cm WITHDIST",
    "GEORADIUSBYMEMBER_RO missing nope 200 cm NOPE",
    "GEORADIUSBYMEMBER_RO geo:cities nope 200 cm",
    # Cells of the whole map are each other's neighbours.
    "GEOSEARCH geo:edges FROMLONLAT 180 85.05112878 BYRADIUS 30000 km WITHDIST",
    "GEOSEARCH geo:many FROMLONLAT -180 -85.05112878 BYBOX 50000 50000 km",
]
MEMBERS = {
    b"geo:many": [b"at:00007", b"at:01100", b"at:00600"],
    b"geo:near": [b"by:003", b"by:111"],
    b"geo:cities": [b"Palermo", b"Suva", b"Svalbard", b"Nuku'alofa"],
    b"geo:edges": [b"north east", b"south west", b"origin", b"last of the east"],
}
# Of several scores one place is made, and Redis takes any of what is equally far where it wants only some.
SEVERAL_AT_ONE_PLACE = [b"zset:large", b"zset:edge", b"geo:odd"]

latitudes = st.one_of(st.floats(-85, 85), st.floats(60, 85), st.floats(37.9, 38.4), st.sampled_from([85.0, -85.0, 0.0]))
longitudes = st.one_of(st.floats(-180, 180), st.floats(13.2, 13.6), st.sampled_from([180.0, -180.0, 179.99]))
lengths = st.floats(-1, 4.7).map(lambda power: b"%r" % (10.0**power))


@st.composite
def searches(draw: st.DrawFn) -> list[bytes]:
    """Make a search that is no error."""
    key = draw(st.sampled_from([*MEMBERS, b"geo:many", b"geo:near", *SEVERAL_AT_ONE_PLACE]))
    words = [b"GEOSEARCH", key]
    if key in MEMBERS and draw(st.booleans()):
        words += [b"FROMMEMBER", draw(st.sampled_from(MEMBERS[key]))]
    else:
        words += [b"FROMLONLAT", b"%r" % draw(longitudes), b"%r" % draw(latitudes)]
    if draw(st.booleans()):
        words += [b"BYRADIUS", draw(lengths), b"km"]
    else:
        words += [b"BYBOX", draw(lengths), draw(lengths), draw(st.sampled_from([b"km", b"mi"]))]
    options: SearchStrategy[list[bytes]] = st.sampled_from(
        [[b"WITHDIST"], [b"WITHCOORD"], [b"WITHHASH"], [b"ASC"], [b"DESC"], [b"WITHDIST", b"ASC"]]
    )
    for option in draw(st.lists(options, max_size=3)):
        words += option
    if key in MEMBERS and draw(st.booleans()):
        words += [b"COUNT", b"%d" % draw(st.sampled_from([1, 2, 5, 50, 600, 5000]))]
        words += draw(st.sampled_from([[], [], [b"ANY"]]))
    return words


@pytest.mark.parametrize("line", LINES)
def test_geo_read_equals_redis(pair: Pair, line: str) -> None:
    pair.check_line(line)


@given(requests=st.lists(searches(), min_size=1, max_size=10))
@checked(75)
def test_geosearch_finds_same_members_in_same_order(pair: Pair, requests: list[Words]) -> None:
    pair.check(requests)
    pair.check([[b"HELLO", b"3"], [b"MULTI"], *requests, [b"EXEC"]])


def test_geo_members_may_have_spaces(pair: Pair) -> None:
    for member in MEMBERS[b"geo:edges"]:
        pair.check([[b"GEOPOS", b"geo:edges", member], [b"GEOHASH", b"geo:edges", member]])
        pair.check([[b"GEOSEARCH", b"geo:edges", b"FROMMEMBER", member, b"BYRADIUS", b"200", b"km", b"WITHDIST"]])


def test_score_of_place_equals_that_of_geoadd(tmp_path: Path) -> None:
    def compare(places: list[tuple[float, float]]) -> None:
        writes: list[Words] = [
            [b"GEOADD", b"places", b"%r" % longitude, b"%r" % latitude, b"%d" % number]
            for number, (longitude, latitude) in enumerate(places)
        ]
        reads: list[Words] = [[b"ZSCORE", b"places", b"%d" % number] for number in range(len(places))]
        replies = replies_to(server.port, [[b"DEL", b"places"], *writes, *reads])
        assert [float(reply.value) for reply in replies[1 + len(places) :]] == [score_of(*place) for place in places]

    everywhere = st.tuples(
        st.one_of(st.floats(-LONGITUDE_MAX, LONGITUDE_MAX), st.sampled_from([-LONGITUDE_MAX, 0.0, LONGITUDE_MAX])),
        st.one_of(st.floats(-LATITUDE_MAX, LATITUDE_MAX), st.sampled_from([-LATITUDE_MAX, 0.0, LATITUDE_MAX])),
    )
    with redis_server(tmp_path) as server:
        given(places=st.lists(everywhere, min_size=1, max_size=50))(checked(30)(compare))()
