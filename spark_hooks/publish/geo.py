"""Coordinates as scores: GEOSEARCH reads sorted sets with such scores.

The score of GEOADD as an expression of Spark SQL, with the arithmetic of `state_backend.codec.geohash`: Spark's doubles
and longs give the same 52 bits. Builds columns on the driver or in a Spark Connect client; starts no Spark job.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from state_backend.codec.geohash import LATITUDE_MAX, LONGITUDE_MAX, STEP_MAX

# (shift, mask) of each step that spreads the bits of a number.
SPREADING = (
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)


def geo_score(longitude: Column | str, latitude: Column | str) -> Column:
    """Return the score of a coordinate pair as a column.

    GEOSEARCH, GEODIST and the other geo commands read sorted sets with such scores.

    Args:
        longitude: A column, or its name, in degrees from -180 to 180.
        latitude: A column, or its name, in degrees from -85.05112878 to 85.05112878, the limits of Redis.

    Returns:
        The score that GEOADD of Redis computes: a column of doubles, null where a coordinate is null. A pair outside
        the limits fails the micro-batch with an error that names the pair; filter such rows out before.

    Examples:
        >>> airports = spark.createDataFrame([("JFK", -73.7789, 40.6397)], "code string, lon double, lat double")
        >>> airports.select(sparkis.geo_score("lon", "lat").cast("long").alias("score")).first().score
        1791895992526725
    """
    east, north = (_column(each).cast("double") for each in (longitude, latitude))
    bits = F.shiftleft(_spread(_fixed(east, LONGITUDE_MAX)), 1).bitwiseOR(_spread(_fixed(north, LATITUDE_MAX)))
    is_valid = east.between(-LONGITUDE_MAX, LONGITUDE_MAX) & north.between(-LATITUDE_MAX, LATITUDE_MAX)
    error = F.concat(
        F.lit("geo_score: longitude "),
        east.cast("string"),
        F.lit(", latitude "),
        north.cast("string"),
        F.lit(f" is outside the limits of Redis: +-{LONGITUDE_MAX:g}, +-{LATITUDE_MAX}. Filter such rows out before."),
    )
    score = F.when(is_valid, bits.cast("double")).otherwise(F.raise_error(error).cast("double"))
    return F.when(east.isNotNull() & north.isNotNull(), score)


def _column(column: Column | str) -> Column:
    return F.col(column) if isinstance(column, str) else column


def _fixed(degrees: Column, degrees_max: float) -> Column:
    """Return a coordinate as an integer of 26 bits; of 27 bits for the upper limit itself."""
    return ((degrees + F.lit(degrees_max)) / F.lit(2 * degrees_max) * F.lit(float(1 << STEP_MAX))).cast("long")


def _spread(number: Column) -> Column:
    """Insert a zero before each bit."""
    return reduce(
        lambda bits, step: bits.bitwiseOR(F.shiftleft(bits, step[0])).bitwiseAND(F.lit(step[1])), SPREADING, number
    )
