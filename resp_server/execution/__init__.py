"""From requests to replies: what commands see (`context`), the dispatcher, EXEC and WATCH, long requests in portions.

The commands themselves are in `commands`; bytes come and go in `client`.
"""
