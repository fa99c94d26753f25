"""A server as one node of a Redis Cluster: who owns which slots, what it says of that, and whom it sends clients to."""
