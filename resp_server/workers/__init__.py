"""Several serving processes behind one port: a master, which accepts connections, and workers, which serve them.

How a single process serves clients is in `serving` and `client`.
"""
