"""State servers over an upstream: each key is answered by its owner.

`overlay_backend` has the parts, and answers a request by its route; `route_sender` sends it. `keyspace` asks both
backends about all keys, `shadow` compares both.
"""
