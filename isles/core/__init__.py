"""The algorithm: no processes, no sockets, no files."""
