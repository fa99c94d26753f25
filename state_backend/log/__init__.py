"""The change log of a job: its files on any filesystem, who may write them, and when they are removed.

Knows no store. What needs both (snapshots, a job under another name) is in `apply`.
"""
