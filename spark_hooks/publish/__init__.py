"""From a DataFrame to the epochs of a change log: the sink, its checks, and how rows become changes.

State that a query keeps without the sink is in `attach`; servers, and how they hear of an epoch, are in `serving`.
"""
