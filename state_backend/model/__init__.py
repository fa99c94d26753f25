"""The model that all other folders share: states, keys and their slots, changes, generations, errors and the clock.

No files, stores or encodings: those are in `log`, `store` and `codec`.
"""
