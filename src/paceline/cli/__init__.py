"""The command line: one verb a file, each imported only when it is asked for."""
