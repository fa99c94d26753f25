"""Places as scores: what makes a sorted set of a job answer GEOSEARCH.

The score of GEOADD as an expression of Spark SQL, in the arithmetic of `state_backend.codec.geohash`: Spark's doubles
and longs give the same 52 bits. Builds columns on the driver or in a Spark Connect client; runs nothing.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from state_backend.codec.geohash import LATITUDE_MAX, LONGITUDE_MAX, STEP_MAX

# What is left of a number when its bits are moved apart, so far each time.
SPREADING = (
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)


def geo_score(longitude: Column | str, latitude: Column | str) -> Column:
    """Return the score of a place as a column.

    In a sorted set of such scores, GEOSEARCH, GEODIST and the like find places.

    Args:
        longitude: A column, or its name, in degrees from -180 to 180.
        latitude: A column, or its name, in degrees from -85.05112878 to 85.05112878, which is where the map of Redis
            ends.

    Returns:
        The score that GEOADD of Redis computes: a column of doubles, null where a coordinate is null. A place outside
        the map fails the micro-batch with an error that names the place; drop such rows before.

    Examples:
        >>> airports = spark.createDataFrame([("JFK", -73.7789, 40.6397)], "code string, lon double, lat double")
        >>> airports.select(sparkis.geo_score("lon", "lat").cast("long").alias("score")).first().score
        1791895992526725
    """
    east, north = (_column(each).cast("double") for each in (longitude, latitude))
    bits = F.shiftleft(_spread(_fixed(east, LONGITUDE_MAX)), 1).bitwiseOR(_spread(_fixed(north, LATITUDE_MAX)))
    is_place = east.between(-LONGITUDE_MAX, LONGITUDE_MAX) & north.between(-LATITUDE_MAX, LATITUDE_MAX)
    error = F.concat(
        F.lit("geo_score: longitude "),
        east.cast("string"),
        F.lit(", latitude "),
        north.cast("string"),
        F.lit(f" is not on the map of Redis: +-{LONGITUDE_MAX:g}, +-{LATITUDE_MAX}. Drop such rows before."),
    )
    score = F.when(is_place, bits.cast("double")).otherwise(F.raise_error(error).cast("double"))
    return F.when(east.isNotNull() & north.isNotNull(), score)


def _column(column: Column | str) -> Column:
    return F.col(column) if isinstance(column, str) else column


def _fixed(degrees: Column, degrees_max: float) -> Column:
    """Return a coordinate as a whole number of 26 bits; of the map's last edge, one more."""
    return ((degrees + F.lit(degrees_max)) / F.lit(2 * degrees_max) * F.lit(float(1 << STEP_MAX))).cast("long")


def _spread(number: Column) -> Column:
    """Put a zero before each bit."""
    return reduce(
        lambda bits, step: bits.bitwiseOR(F.shiftleft(bits, step[0])).bitwiseAND(F.lit(step[1])), SPREADING, number
    )
