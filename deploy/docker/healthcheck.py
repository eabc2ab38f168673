"""Exit code 0 while the broker in this container serves: what HEALTHCHECK asks.

It asks for liveness: a broker whose database is down holds the buffer, and restarting it would help
nobody. The port is the broker's own; with a certificate it speaks TLS, and which name that is for
does not matter here.
"""

import os
import ssl
import sys
import urllib.request

port = os.environ.get("PENSTOCK_HTTP_SERVER_PORT", "6632")
secure = bool(
    os.environ.get("PENSTOCK_TLS_CERTIFICATE")
    or os.environ.get("PENSTOCK_HTTP_SERVER_SSL_CERT_PATH")
)
context = ssl.create_default_context()
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
url = f"{'https' if secure else 'http'}://127.0.0.1:{port}/health/live"
try:
    urllib.request.urlopen(url, timeout=4, context=context if secure else None)
except OSError as error:
    sys.exit(f"{url}: {error}")
