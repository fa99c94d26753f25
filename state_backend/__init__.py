"""State as bytes: descriptors, the change log, stores. Knows neither Redis replies nor Spark."""

# What `sparkis.packages` knows this package by: PyPI has others of such names.
DISTRIBUTION = "sparkis"
