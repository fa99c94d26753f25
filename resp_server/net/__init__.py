"""Networking and processes: TLS, addresses, listening sockets, child processes, a small synchronous client.

The connections of clients are in `client`; the control ports for our own processes are in `serving`.
"""
