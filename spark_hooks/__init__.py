"""Spark's side: the sink, serving from a driver, the command line. The only package that imports pyspark."""

# What `sparkis.packages` knows this package by: PyPI has others of such names.
DISTRIBUTION = "sparkis"
