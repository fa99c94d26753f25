"""The types of `stored_reads.pyx`, which has the docstrings."""

from resp_server.native.fast_path import FastPath

class StoredReads(FastPath): ...
