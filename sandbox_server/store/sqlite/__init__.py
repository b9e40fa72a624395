"""The store in a SQLite file: the connection, the thread that writes, and checks of the file on disk."""
