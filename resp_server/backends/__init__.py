"""What answers requests: the backends.

stores    this process' own stores
servers   state servers behind a proxy
redis     a team's own Redis
overlay   servers and a Redis: `routing`, which is pure, decides which of both answers a request
"""
