"""The default store: its tables, writing and reading them, and finding damage in them.

py-lmdb does all writes; `native` reads what is asked most from the same pages. Epochs come from `apply`.
"""
