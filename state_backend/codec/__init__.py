"""Encodings of values: packed lists, maps and sorted sets, checksums, geohashes, and how reducing states fold values.

Pure functions. Files are in `log`, tables in `lmdb`.
"""
