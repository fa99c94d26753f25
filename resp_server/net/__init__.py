"""Between processes: TLS, addresses, listening sockets, child processes, a small synchronous client.

Clients' connections are in `client`; the ports for our own processes are in `serving`.
"""
