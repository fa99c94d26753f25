"""Metrics and health over HTTP: `/metrics` in the format of OpenMetrics, `/livez`, `/readyz`.

Everything is read when somebody asks: no request of a Redis client counts anything for it.
"""
