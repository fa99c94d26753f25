"""The swap: a team's own Redis, the upstream, behind the address of a proxy or a server.

Here is which side answers a request (`routing`, `ownership`), and the connections to the upstream (`pool`,
`connection`). Not here: clients, and the servers of states.
"""
