"""The default store: its tables, a writer and a reader for each kind of state, expiry, and checks for damage.

py-lmdb does all writes; `native` serves the most frequent reads from the same pages. Epochs come from `apply`.
"""
