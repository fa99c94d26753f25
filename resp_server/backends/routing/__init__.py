"""Which backend answers a request: rules, the owners of keys, and the router. Nothing here sends or waits.

`router` routes a request. `ownership` knows the key formats of all states, `rules` the team's own rules.
"""
