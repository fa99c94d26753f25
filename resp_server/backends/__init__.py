"""What answers requests: `servers`, state servers behind a proxy; `redis`, a team's own Redis; `overlay`, both.

`routing` decides which of both answers a request. It is pure. An overlay has the two others and a router.
"""
