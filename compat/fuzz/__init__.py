"""Fuzzing: arbitrary bytes in arbitrary chunks for a server's parser, dispatcher and commands, without sockets."""
