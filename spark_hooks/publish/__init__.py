"""The sink: DataFrames become epochs of a change log. Here are its checks, its writers, and the encoding of rows.

Reading the state of queries without the sink is in `attach`; servers, and their notices of epochs, are in `serving`.
"""
