"""`sparkis ui`: a page in the browser about any endpoint of sparkis. A plain Redis client, which only reads.

`client` is the only module that knows redis-py, `facts` and `values` know the replies, `polling` and `watching` ask for
them once for all browsers, `pages/` has a module and `templates/` a template for each page. Design:
docs/design/0010-ui.md.
"""

DISTRIBUTION = "sparkis"
