"""Scores of places equal those found by bisection, and searches find what comparing every place finds."""

from __future__ import annotations

from math import isnan

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from compat.examples import examples
from state_backend.codec.geohash import (
    EARTH_RADIUS,
    LATITUDE_MAX,
    LONGITUDE_MAX,
    STEP_MAX,
    Box,
    Circle,
    Point,
    as_signed,
    as_unsigned,
    cells_of,
    degrees_text,
    distance,
    distance_text,
    geohash_text,
    point_of,
    score_of,
)

longitudes = st.floats(-LONGITUDE_MAX, LONGITUDE_MAX)
latitudes = st.floats(-LATITUDE_MAX, LATITUDE_MAX)
places = st.tuples(longitudes, latitudes)
# Where Redis' nine squares cover what is asked for; nearer to the poles and to the edge of the map they may not.
middles = st.tuples(st.floats(-150, 150), st.floats(-55, 55))
METERS_OF_DEGREE = EARTH_RADIUS * 0.0175


def halved(place: Point) -> int:
    """Return the bits of a place by halving what it may be in, longitude first."""
    bits, ends = 0, [[-LONGITUDE_MAX, LONGITUDE_MAX], [-LATITUDE_MAX, LATITUDE_MAX]]
    for at in range(2 * STEP_MAX):
        low, high = ends[at % 2]
        center = (low + high) / 2
        is_above = place[at % 2] >= center
        ends[at % 2] = [center, high] if is_above else [low, center]
        bits = bits << 1 | is_above
    return bits


def is_at_edge(place: Point) -> bool:
    """Return whether a place is at the last longitude or latitude, where a score lacks a bit for the number."""
    return place[0] + LONGITUDE_MAX == 2 * LONGITUDE_MAX or place[1] + LATITUDE_MAX == 2 * LATITUDE_MAX


@given(place=places)
@example(place=(179.99999999999997, 0.0))
def test_geo_score_equals_bisection(place: Point) -> None:
    found = int(score_of(*place))
    # A place at the very edge of a cell may be on either side of it: rounding decides. At the map's own edge the score
    # is beyond all cells, as in Redis.
    nudged = {halved((place[0] + east, place[1] + north)) for east in (-1e-9, 0, 1e-9) for north in (-1e-9, 0, 1e-9)}
    assert found in nudged or is_at_edge(place)


@given(place=places)
def test_decoded_geo_score_is_near_place(place: Point) -> None:
    assume(not is_at_edge(place))
    longitude, latitude = point_of(score_of(*place))
    assert abs(longitude - place[0]) <= LONGITUDE_MAX / 2**STEP_MAX + 1e-9
    assert abs(latitude - place[1]) <= LATITUDE_MAX / 2**STEP_MAX + 1e-9


@given(bits=st.integers(0, 2**52 - 1))
def test_place_of_score_has_that_score(bits: int) -> None:
    assert score_of(*point_of(float(bits))) == bits
    assert len(geohash_text(float(bits))) == 11


@given(score=st.one_of(st.floats(allow_nan=False), st.integers(-(2**70), 2**70).map(float)))
def test_any_score_is_read_as_some_place(score: float) -> None:
    longitude, latitude = point_of(score)
    assert -LONGITUDE_MAX <= longitude <= LONGITUDE_MAX and -LATITUDE_MAX <= latitude <= LATITUDE_MAX
    assert 0 <= as_unsigned(score) < 2**64 and -(2**63) <= as_signed(score) < 2**63


@pytest.mark.parametrize("place", [(180.1, 0.0), (0.0, 85.06), (float("nan"), 0.0), (0.0, float("-inf"))])
def test_place_off_map_has_no_score(place: Point) -> None:
    with pytest.raises(ValueError, match="no point on the map"):
        score_of(*place)


@given(one=places, other=places)
def test_distances_are_those_of_sphere(one: Point, other: Point) -> None:
    there, back = distance(one, other), distance(other, one)
    if not isnan(there):
        assert 0 <= there <= 3.1416 * EARTH_RADIUS
        assert there == pytest.approx(back, rel=1e-9, abs=1e-6)
        assert abs(float(distance_text(there, 1000.0)) - there / 1000) <= 0.00006
    assert distance(one, one) == 0


@given(
    center=middles,
    width=st.floats(0.01, 2_000_000),
    height=st.floats(0.01, 2_000_000),
    aside=st.floats(-1, 1),
    up=st.floats(-1, 1),
    is_circle=st.booleans(),
)
@settings(max_examples=examples(250))
def test_places_in_shape_are_in_its_cells(
    center: Point, width: float, height: float, aside: float, up: float, is_circle: bool
) -> None:
    shape = Circle(center, width / 2) if is_circle else Box(center, width, height, 1.0)
    near = point_of(
        score_of(center[0] + aside * width / METERS_OF_DEGREE, center[1] + up * height / METERS_OF_DEGREE / 2)
    )
    if shape.distance(near) is not None:
        score = score_of(*near)
        assert any(low <= score < high for low, high in (cell.scores for cell in cells_of(shape)))


@given(center=middles, radius=st.floats(1, 500_000))
def test_search_reads_few_members_beyond_its_count(center: Point, radius: float) -> None:
    cells = list(cells_of(Circle(center, radius)))
    assert len(cells) <= 9
    # A square is at most so much larger than the radius, which a search has nine of.
    degrees = max(360 / (1 << cell.step) for cell in cells)
    assert degrees * METERS_OF_DEGREE <= 16 * radius or cells[0].step == STEP_MAX


@given(degrees=st.floats(-180, 180))
def test_coordinate_is_written_with_17_digits_and_no_zeros_behind(degrees: float) -> None:
    text = degrees_text(degrees).decode()
    assert abs(float(text) - degrees) <= 1e-17
    assert text == "0" or not text.startswith("-0") or "." in text
    assert "." not in text or text[-1] not in "0."
