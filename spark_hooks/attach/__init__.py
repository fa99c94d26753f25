"""Attaching to a query from outside: its state becomes readable with no change to the query.

checkpoint   which batches are committed
operators    which state a query keeps
rows         what Spark's state reader gives, as rows with plain columns
task         rows to change files, on executors
attachment   the follower
declared     which states the processors of a query declare
automatic    follows queries that declare states, from their start to their end
"""

from spark_hooks.attach.attachment import Attachment, attach
from spark_hooks.attach.automatic import watch_declared
from spark_hooks.attach.rows import AttachedState

__all__ = ["AttachedState", "Attachment", "attach", "watch_declared"]
