"""The sink: DataFrames become epochs of a change log. Here are its checks, its writers, and the encoding of rows.

`attach` reads the state of queries without a sink. `serving` has the servers, and announces epochs to them.
"""
