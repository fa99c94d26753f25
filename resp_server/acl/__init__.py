"""Who may do what: users, their rules and rates, the keys and jobs that they see, the log of refusals.

No socket and no reply: `commands.acl` shows and changes it, `execution` asks it.
"""
