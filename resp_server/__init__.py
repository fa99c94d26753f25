"""A read-only Redis server over a keyspace of Spark state: the protocol, the commands, the sockets."""
