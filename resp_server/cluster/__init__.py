"""A server as one node of a Redis Cluster: the topology, which slots the node answers, and CLUSTER's replies.

Which server is to own which slots is decided in `registry`; a proxy's map of them is in `proxy`.
"""
