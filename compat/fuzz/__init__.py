"""Any bytes in any chunks, against the parser, the dispatcher and the commands of a server without sockets."""
