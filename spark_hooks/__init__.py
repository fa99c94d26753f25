"""Spark's side: the sink, serving from a driver, the command line. The only package that imports pyspark."""
