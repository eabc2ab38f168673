"""Certificates for servers and clients on this machine."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def certificate(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A self-signed one for `name`, with its key, in PEM files."""
    return Authority(name).write(directory)


class Authority:
    """A certificate that may sign others."""

    def __init__(self, name: str = "Test CA") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(name, self.name, self.key, 1, authority=True)

    def write(self, directory: Path, stem: str = "cert", key: str = "key") -> tuple[Path, Path]:
        return _write(directory, self.certificate, self.key, stem, key)

    def issue(
        self, directory: Path, name: str = "localhost", stem: str = "server", days: int = 1
    ) -> tuple[Path, Path]:
        """A certificate for `name` and its key, in `<stem>.pem` and `<stem>.key.pem`; expired if
        `days` is below 0.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return _write(
            directory,
            self._sign(name, subject, key, days, authority=False),
            key,
            stem,
            f"{stem}.key",
        )

    def _sign(
        self,
        name: str,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        days: int,
        *,
        authority: bool,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(_usage(authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
            .sign(self.key, hashes.SHA256())
        )


def _usage(authority: bool) -> x509.KeyUsage:
    """Python 3.13 accepts a certificate only if it says what its key is for, and whose it is."""
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    directory: Path,
    made: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    stem: str,
    key_stem: str,
) -> tuple[Path, Path]:
    cert_path, key_path = directory / f"{stem}.pem", directory / f"{key_stem}.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_path, key_path
