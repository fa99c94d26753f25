"""Attaching to a query: its state becomes readable from its checkpoint, without a change to the query.

`start` makes an `attachment`, which follows the checkpoint. `processor` declares states, `declared` reads declarations
from a query's plan, `automatic` attaches to such queries. Python workers import `processor`, so nothing is imported
here.
"""
