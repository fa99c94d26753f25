"""Attaching to a query: its state becomes readable without a change to the query, from its checkpoint.

`start` makes an `attachment`, which follows the checkpoint. `processor` declares states, `declared` reads declarations
from a query's plan, `automatic` attaches to such queries. Writing epochs is in `publish`. Python workers import
`processor`, so nothing is imported here.
"""
