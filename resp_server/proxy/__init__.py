"""A proxy: holds no state; forwards clients' requests to the servers of a topology, each for its slots.

`dispatcher` routes requests, `state_cluster` knows an application's servers, `server_connection` has the sockets.
The topology is in `cluster`, the plan that makes it in `registry`.
"""
