"""Who may do what: rules, users, the log of refusals, limits of rates, which keys and jobs a user sees."""
