"""Values as bytes and text: packed lists, maps and sorted sets, checksums, places as scores, what reducing states fold.

Pure functions of their arguments. Where the bytes lie is said in `log` and `lmdb`.
"""
