"""Between processes: TLS, addresses, listening sockets, child processes, a small client."""
