"""Access control: users and their rules, rate limits, visible keys and jobs, the log of denials.

Pure: no sockets and no replies. `commands.acl` reads and changes users; `pipeline.admission` checks each request.
"""
