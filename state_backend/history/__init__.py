"""Reading the past: a state as a table, the values that a key had, the difference between two epochs.

Each reads a job's log as of a past moment (`log.time_travel`). `serve --as-of` is not here: it uses the applier
with a `PastLog`.
"""
