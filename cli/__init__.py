"""The command line: a file for each command, and what the commands print."""
