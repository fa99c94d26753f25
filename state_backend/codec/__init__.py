"""Encodings of values: packed lists, maps and sorted sets, checksums, geohashes, and reductions.

Pure functions. Files are in `log`, tables in `lmdb`.
"""
