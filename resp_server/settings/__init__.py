"""The table of settings: each setting is one row, whatever takes it.

A row is a field of a dataclass here, with its default, its option and what else is known of it (`setting.Setting`).
From the rows follow the options of all programs, and with them configuration files and the environment; CONFIG; the
groups of `sparkis.serve`; and the tables of options in docs/. A new setting is a row, and the place that uses it.

    option_values, config_values
                   how values are written: as options, in CONFIG
    event_classes  the values of `notify-keyspace-events`
    setting        the type of a row
    server         `ServerConfig`: what a server reads while it runs
    groups, tls    the groups of `sparkis.serve`
    programs       all other options, and which program has which options, in which order
"""
