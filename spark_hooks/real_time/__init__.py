"""Values before their commit: the rows of a query in Real-Time Mode reach the servers as the query emits them.

    query ── rows ──► SparkisWriter.java, in the executors ──► state servers: readable at once, until the commit
      └── checkpoint ──► attachment ──► change log ──► state servers: readable from the commit on

`queryable` starts both; docs/design/0011-real-time.md has the reasons.
"""
