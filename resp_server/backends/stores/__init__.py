"""This process' own stores: runs commands over them. The commands are in `commands`, the checks before in `pipeline`.

A proxy has no stores; its own commands, such as PING and CONFIG, run here, too.
"""
