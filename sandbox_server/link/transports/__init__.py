"""The transports of a link: a unix socket, TCP with TLS, or the standard input and output of a relay."""
