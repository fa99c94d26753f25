"""Reading the past: a state as a table, the values that a key had, the difference between two epochs.

Each reads a job's log as of a past moment (`state_backend.log.past`). Servers of a past moment are not here: they use
the applier with such a log.
"""
