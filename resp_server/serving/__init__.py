"""A server as a whole: sockets and clocks, the jobs that it shows, appliers, control ports."""
