"""`sparkis ui`, a page in the browser, and `sparkis top`, a terminal. A plain Redis client, which only reads.

`client` is the only module that knows redis-py, `facts` and `values` know the replies, `polling` and `watching` ask for
them once for all browsers, `pages/` has a module and `templates/` a template for each page. Design:
docs/design/0010-ui.md.
"""

DISTRIBUTION = "sparkis"
DEFAULT_PAGE_PORT = 7380
