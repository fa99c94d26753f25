"""A server as one node of a Redis Cluster: the topology, the slots that the node answers, and CLUSTER's replies.

`registry` decides which server owns which slots. A proxy's own map of the slots is in `backends.servers`.
"""
