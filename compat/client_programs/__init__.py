"""Programs of Redis' clients, in each client's language, at a real server and at sparkis: `make test-clients`.

The README says how to add a client.
"""
