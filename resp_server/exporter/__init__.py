"""Metrics and health over HTTP: `/metrics` in the format of OpenMetrics, `/livez`, `/readyz`.

All values are read at a scrape. So metrics cost the requests of Redis clients nothing.
"""
