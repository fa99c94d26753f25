"""A proxy with an upstream: `dispatcher` routes each key to the states or to the upstream, a team's own Redis.

`sides` sends requests about all keys to both, `shadow` compares them. The owners of keys, and connections to the
upstream, are in `upstream`.
"""
