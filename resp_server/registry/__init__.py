"""The registry: decides in one process which state server owns which slots, and every server's client of it.

`sharding` and `assignment` are the pure plans, `service` has the sockets, `registry_file` the file in the log's root.
No read of a key passes here; the topology as servers and clients see it is in `cluster`.
"""
