"""Fuzzing: arbitrary bytes in arbitrary chunks for a server's parser, pipeline and commands, without sockets."""
