"""The sink: DataFrames become epochs of a change log. Its checks and its writers are here.

`state_backend.codec.row_encoding` encodes the rows.
`attach` reads the state of queries without a sink. `serving` starts servers, and announces epochs to them.
"""
