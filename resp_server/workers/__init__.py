"""Several serving processes behind one port: a master that hands out connections, and its workers."""
