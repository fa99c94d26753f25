"""What clients are sent without asking: messages, notifications, invalidations, MONITOR."""
