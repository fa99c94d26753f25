"""A read-only Redis server over a keyspace of Spark state: the protocol, the commands, the sockets."""

# What `sparkis.packages` knows this package by: PyPI has others of such names.
DISTRIBUTION = "sparkis"
