"""Replies that are passed on as bytes: where each ends, and how several are put together.

Used for the state servers behind a proxy and for a team's own Redis (`upstream`). No sockets here.
"""
