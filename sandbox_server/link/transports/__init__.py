"""How the bytes of a link get to an agent and back: a unix socket, TCP with TLS, or the standard input and output of a relay."""
