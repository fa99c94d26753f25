"""A read-only Redis server over a keyspace of Spark state: the protocol, the commands, the sockets."""

# The distribution of this package. `sparkis.packages` checks it: other distributions may have a package of this name.
DISTRIBUTION = "sparkis"
