"""Exit with 0 if the server of this container answers PING, else with 1 and the reason: for HEALTHCHECK and probes.

    python healthcheck.py [PORT]

It logs in with SPARKIS_PASSWORD. A server that loads its jobs, or a state server without slots, replies LOADING, so
this says whether clients may come, not whether the process must be restarted. It speaks no TLS: give a server with
`--tls-port` a plain port for it.
"""

from __future__ import annotations

import os
import socket
import sys

DEFAULT_PORT = 7379
# A server delays a reply for up to a second before it is LOADING.
TIMEOUT_S = 4.0
REPLY_BYTES_MAX = 1024


def main(port: int) -> str:
    """Return an empty text if the server answers PONG, else what is wrong."""
    password = os.environ.get("SPARKIS_PASSWORD", "").encode()
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            replies = connection.makefile("rb")
            if password:
                connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(password), password))
                if not (reply := replies.readline(REPLY_BYTES_MAX)).startswith(b"+OK"):
                    return f"AUTH: {reply.decode(errors='replace').strip()}"
            connection.sendall(b"*1\r\n$4\r\nPING\r\n")
            reply = replies.readline(REPLY_BYTES_MAX)
    except OSError as error:
        return f"127.0.0.1:{port}: {error}"
    return "" if reply.startswith(b"+PONG") else f"PING: {reply.decode(errors='replace').strip() or 'no reply'}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PORT) or None)
