"""The swap: a team's own Redis, the upstream, behind the address of a proxy or a server.

`routing` and `ownership` decide which side answers a request. `pool` and `connection` connect to the upstream. Clients
and state servers are not here.
"""
