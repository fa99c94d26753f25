"""Attaching to a query from outside: its state becomes readable with no change to the query.

`start` begins, `attachment` follows; `processor` declares, `declared` finds declarations, `automatic` attaches to them.
Writing epochs is in `publish`. Python workers import `processor`: nothing is imported here.
"""
