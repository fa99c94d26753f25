"""A proxy with an upstream: `dispatcher` routes each key to the states or to the upstream, a team's own Redis.

`sides` asks both about all keys, `shadow` compares them. Which side owns a key, and connections to the upstream, are in
`upstream`.
"""
