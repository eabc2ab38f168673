"""TLS for outgoing connections: trusted CAs, client certificates and helpful errors.

Clients, commands, Spark processes and routes create their contexts here. The defaults come from
PENSTOCK_CA_FILE (CA certificates instead of the system's), PENSTOCK_CLIENT_CERT and
PENSTOCK_CLIENT_KEY (for a broker that requires a client certificate).
"""

import asyncio
import os
import ssl
from pathlib import Path

from penstock.errors import InvalidRequest

CA_FILE, CLIENT_CERT, CLIENT_KEY = "PENSTOCK_CA_FILE", "PENSTOCK_CLIENT_CERT", "PENSTOCK_CLIENT_KEY"
_PEM = "-----BEGIN"


def is_pem(text: str) -> bool:
    """Return whether `text` is the content of a PEM file rather than a file name."""
    return _PEM in text


def client_context(
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> ssl.SSLContext:
    """Return a context for clients. `ca` is a PEM file or its text. `certificate` and `key` are PEM
    files; without `key`, the certificate's file contains both.
    """
    ca = ca or os.environ.get(CA_FILE) or None
    certificate = certificate or os.environ.get(CLIENT_CERT) or None
    key = key or os.environ.get(CLIENT_KEY) or None
    try:
        text = str(ca) if ca is not None and _PEM in str(ca) else None
        context = ssl.create_default_context(cafile=None if text else ca, cadata=text)
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise InvalidRequest(
            f"cannot read the CA's certificates from {ca}: {_reason(error)}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"cannot use the client certificate {certificate} with key {key}: {_reason(error)}"
            ) from None
    return context


def ca_text(ca: str | None) -> str | None:
    """Return the text of a CA file (default: PENSTOCK_CA_FILE), to send to other machines."""
    ca = ca or os.environ.get(CA_FILE) or None
    if ca is None or _PEM in ca:
        return ca
    try:
        return Path(ca).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"cannot read the CA's certificates from {ca}: {_reason(error)}"
        ) from None


def explain(error: BaseException, *, handshaking: bool = False) -> str:
    """Explain a connection error. With `handshaking`, it may be from a TLS handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if error.verify_code == 10:
            return "the broker's certificate has expired"
        if error.verify_code in (18, 19, 20, 21):
            return (
                f"the broker's certificate is not from a trusted CA ({why}): "
                f"name its CA file in {CA_FILE}"
            )
        return f"the broker's certificate is not accepted: {why}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
            return "this port does not use TLS: use http:// or tcp://"
        if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
            return (
                "the broker requires a client certificate: "
                f"name one in {CLIENT_CERT} and {CLIENT_KEY}"
            )
        if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_EXPIRED" in reason:
            why = reason.lower().replace("_", " ")
            return f"the broker does not accept our client certificate ({why})"
        return f"TLS failed: {reason or error}"
    if (
        handshaking
        and isinstance(error, ConnectionError)
        and not isinstance(error, ConnectionRefusedError)
    ):
        reason = str(error) or "the connection was closed during the handshake"
        return f"{reason} (TLS: does the broker require another version, or a client certificate?)"
    return str(error)


def first_answer_missing(transport: asyncio.BaseTransport) -> str:
    """Return a hint for a connection that ended before its first answer.

    Under TLS 1.3, the client finishes its handshake before the server checks its certificate.
    """
    tls = transport.get_extra_info("ssl_object") is not None
    return " (TLS: does the broker require a client certificate?)" if tls else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; use a key without a password")
