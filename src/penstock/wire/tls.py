"""Certificates of the listeners, renewed without a restart.

A `Certificate` is one SSL context for the life of the broker. Its files are checked every few
seconds and on SIGHUP. Changed files are loaded into a separate context first. A certificate whose
key has not arrived yet, or a half-written file, is logged and tried again later; connections keep
using the previous one. Open connections are not affected.
"""

import asyncio
import logging
import ssl
import time
from pathlib import Path

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.io.tasks import repeated
from penstock.metrics import Metrics

log = logging.getLogger("penstock.tls")

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class Certificate:
    def __init__(
        self,
        certificate: Path | None,
        key: Path | None,
        client_ca: Path | None = None,
        minimum: str = "1.2",
    ) -> None:
        """`key` may be in the certificate's file. `client_ca` requires client certificates."""
        if certificate is None:
            raise ConfigError("a TLS key is set, but no certificate")
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._minimum = minimum  # TLS version
        self._seen = self._stamps()  # of the files at the last read
        self._failed = ""  # why they could not be used; "": they are in use
        self.expires = 0.0  # seconds since 1970
        self.context = self._make()
        self._note_expiry()

    def _make(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self._minimum]
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for path in (self._certificate, self._key, self._client_ca):
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise ConfigError(f"TLS: cannot read {path}: {error.strerror}") from None
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            if reason == "KEY_VALUES_MISMATCH":
                key = self._key or self._certificate
                raise ConfigError(
                    f"TLS: the key {key} does not belong to the certificate {self._certificate}"
                ) from None
            what = f"{self._certificate}" + (f" with key {self._key}" if self._key else "")
            raise ConfigError(f"TLS: cannot use the certificate {what}: {_words(reason)}") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                reason = _words(error.reason or str(error))
                raise ConfigError(
                    f"TLS: cannot use the client CA {self._client_ca}: {reason}"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        stamps: list[tuple[int, int, int] | None] = []
        for path in (self._certificate, self._key, self._client_ca):
            try:
                file = path.stat() if path is not None else None
                stamps.append((file.st_mtime_ns, file.st_ino, file.st_size) if file else None)
            except OSError:
                stamps.append(None)
        return stamps

    def reload_if_changed(self) -> bool:
        """Reload changed files; return True if a new certificate is in use."""
        stamps = self._stamps()
        if stamps == self._seen and not self._failed:
            return False
        return self.reload()

    def reload(self) -> bool:
        """Reload the files; log a failure and try again when they change."""
        self._seen = self._stamps()
        try:
            self._make()
            self._load(self.context)
        except ConfigError as error:
            if str(error) != self._failed:
                log.error(
                    "the certificate was not renewed, the previous one stays in use: %s", error
                )
            self._failed = str(error)
            return False
        self._failed = ""
        self._note_expiry()
        log.info(
            "TLS: %s was reloaded and is valid until %s", self._certificate, _day(self.expires)
        )
        return True

    def _note_expiry(self) -> None:
        from cryptography import x509  # 10 MiB, only loaded with certificates

        first = x509.load_pem_x509_certificates(self._certificate.read_bytes())[0]
        self.expires = first.not_valid_after_utc.timestamp()
        if self.expires < time.time():
            log.error(
                "TLS: the certificate %s expired on %s: clients will refuse it",
                self._certificate,
                _day(self.expires),
            )


class Certificates:
    """The certificate of each listener, from the configuration; None: plain text."""

    def __init__(self, config: Config) -> None:
        tls, http, websocket = config.tls, config.http_server, config.websocket_server

        def configured(certificate: Path | None, key: Path | None) -> Certificate | None:
            if not certificate and not key:
                return None
            return Certificate(certificate, key, tls.client_ca, tls.min_version)

        shared = configured(tls.certificate, tls.private_key)
        if shared is None and tls.client_ca:
            raise ConfigError("tls.client_ca is set, but no tls.certificate")
        own = configured(http.ssl_cert_path, http.ssl_key_path)
        self.http = own or (shared if http.tls else None)
        own = configured(websocket.ssl_cert_path, websocket.ssl_key_path)
        self.websocket = own or (self.http or shared if websocket.tls else None)
        self.tcp = shared if config.tcp_server.tls else None
        self.kafka = shared if config.kafka_server.tls else None
        self._interval = tls.reload_interval
        self._watching: asyncio.Task[None] | None = None

    @property
    def all(self) -> list[Certificate]:
        every = (self.http, self.websocket, self.tcp, self.kafka)
        return list({id(one): one for one in every if one}.values())

    @property
    def expires(self) -> float:
        """Return the earliest expiry, in seconds since 1970; 0 without certificates."""
        return min((one.expires for one in self.all), default=0.0)

    def start(self, metrics: Metrics) -> None:
        """Reload files that change, from now on."""
        if self._interval and self.all:
            self._watching = repeated("certificates", self._reload_changed, self._interval, metrics)

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def reload(self) -> None:
        for one in self.all:
            one.reload()

    def _reload_changed(self) -> None:
        for one in self.all:
            one.reload_if_changed()


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _no_password() -> str:
    raise ValueError("the key is encrypted; a key without a password is needed")
