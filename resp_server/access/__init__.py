"""Who may do what: users, their rules, their rates. No socket; commands and the dispatcher ask, and change."""
