"""State servers behind a proxy: forwards requests to the servers of a topology, each to the owner of its slots.

`servers_backend` decides which requests servers answer, `state_sender` sends them, `state_cluster` knows a
state cluster's servers, `server_connection` has the sockets. The topology is in `cluster`, the plan that makes it in
`registry`.
"""
