"""Attachments that need Spark: to a query of this driver, by Spark's own state reader, to processors' declared states.

How an attachment follows a checkpoint is not here: see `state_backend.attach`. Python workers import `processor` from
here, so this module imports nothing.
"""
