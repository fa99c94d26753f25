"""A proxy: it holds no state, and answers plain clients from the servers of a topology, each for its slots."""
