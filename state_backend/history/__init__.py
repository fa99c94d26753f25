"""Reading the past: a state as a table, the values that a key had, the difference between two epochs.

Each reads a job's log as of a past moment (`state_backend.log.past`). `serve --as-of` is not here: it uses the applier
with a `PastLog`.
"""
