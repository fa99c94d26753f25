"""`sparkis ui`, a page in the browser, and `sparkis top`, a table in the terminal: Redis clients that only read.

`client` is the only module that imports redis-py. `facts` and `values` parse replies. `polling` and `watching` send
each request once for all browsers of a user. `pages/` has a module and `templates/` a template for each page. Design:
docs/design/0010-ui.md.
"""

DISTRIBUTION = "sparkis"
DEFAULT_PAGE_PORT = 7380
