"""The sink: DataFrames become epochs of a change log. Its checks, its writers, and the encoding of rows are here.

`attach` reads the state of queries without a sink. `serving` starts servers, and announces epochs to them.
"""
