"""A team's own Redis, the upstream: a single one, one behind Sentinel, or a Redis Cluster.

`upstream` is the interface of all three. `pool` and `connection` connect to one Redis. Clients and state servers are
not here.
"""
