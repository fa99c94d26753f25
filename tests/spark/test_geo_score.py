"""geo_score: the scores of GEOADD in Spark, and a job whose sorted set answers GEOSEARCH."""

from __future__ import annotations

from random import Random

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from state_backend.codec.geohash import LATITUDE_MAX, LONGITUDE_MAX, score_of

RANDOM = Random(52)
PLACES = [
    (RANDOM.uniform(-LONGITUDE_MAX, LONGITUDE_MAX), RANDOM.uniform(-LATITUDE_MAX, LATITUDE_MAX)) for _ in range(3000)
]
PLACES += [
    (longitude, latitude)
    for longitude in (-LONGITUDE_MAX, -0.0, 0.0, 5e-324, 179.99999999999997, LONGITUDE_MAX)
    for latitude in (-LATITUDE_MAX, 0.0, 1e-300, LATITUDE_MAX)
]


def test_spark_makes_scores_that_geoadd_makes(spark: SparkSession) -> None:
    df = spark.createDataFrame(PLACES, "longitude double, latitude double")
    rows = df.select(sparkis.geo_score("longitude", F.col("latitude"))).collect()
    assert [row[0] for row in rows] == [score_of(*place) for place in PLACES]


def test_numbers_of_other_types_are_coordinates_too(spark: SparkSession) -> None:
    df = spark.sql("SELECT 13 AS longitude, CAST(38.5 AS DECIMAL(10, 4)) AS latitude")
    assert df.select(sparkis.geo_score("longitude", "latitude")).first() == (score_of(13.0, 38.5),)


def test_place_without_coordinate_has_no_score(spark: SparkSession) -> None:
    df = spark.createDataFrame([(None, 1.0), (1.0, None)], "longitude double, latitude double")
    assert [row[0] for row in df.select(sparkis.geo_score("longitude", "latitude")).collect()] == [None, None]


@pytest.mark.parametrize("place", [(180.5, 0.0), (0.0, 86.0), (float("nan"), 0.0), (0.0, float("-inf"))])
def test_place_that_is_not_on_map_fails_by_name(spark: SparkSession, place: tuple[float, float]) -> None:
    df = spark.createDataFrame([place], "longitude double, latitude double")
    with pytest.raises(PySparkException, match=r"geo_score: longitude .* is outside the limits of Redis"):
        df.select(sparkis.geo_score("longitude", "latitude")).collect()


@pytest.mark.slow
@pytest.mark.usefixtures("endpoint")
def test_geo_commands_read_sorted_set_of_geo_scores(spark: SparkSession, client: redis.Redis) -> None:
    shops = spark.sql(
        "SELECT * FROM VALUES ('Palermo', 13.361389, 38.115556), ('Catania', 15.087269, 37.502669), "
        "('Praha', 14.43724, 50.07552) AS shops(city, lon, lat)"
    ).withColumn("place", sparkis.geo_score("lon", "lat"))
    sparkis.publish_table(shops, "shops", member="city", score="place", job="places")
    near = client.geosearch("places:shops", longitude=15, latitude=37, radius=200, unit="km", sort="ASC", withdist=True)
    assert near == [["Catania", 56.4413], ["Palermo", 190.4424]]
    assert client.geodist("places:shops", "Palermo", "Catania", "km") == 166.2742
    (palermo, absent) = client.geopos("places:shops", "Palermo", "nobody")
    assert palermo == pytest.approx((13.361389, 38.115556))
    assert absent is None
