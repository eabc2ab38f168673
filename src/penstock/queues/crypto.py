"""Encryption at rest of payloads: AES-256-GCM, done here, so that the database never sees the clear text.

A stored payload of an encrypted queue is

    byte 0..11    nonce, random
    byte 12..     ciphertext, then the 16 bytes of the tag

with the partition's number (8 bytes, big-endian) as associated data: a ciphertext moved to another partition does not
open. The id of the key is stored beside it, so keys can rotate: the last configured one encrypts, the others still open
what they sealed. Without a key a queue that asks for encryption refuses pushes; clear text is never stored instead.
"""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.config.schema import Queues as Settings
from penstock.errors import ConfigError, Damaged, MissingKey

SINGLE = "default"  # the id of a key configured on its own
NONCE = 12


class Keys:
    def __init__(self, settings: Settings) -> None:
        configured = dict(settings.encryption_keys)
        if settings.encryption_key:
            configured = {SINGLE: settings.encryption_key} | configured
        self._ciphers = {name: AESGCM(_key(name, digits)) for name, digits in configured.items()}
        self.current = next(reversed(configured), None)

    @property
    def missing(self) -> MissingKey:
        return MissingKey("this queue is encrypted and the broker has no encryption key (queues.encryption_key)")

    def seal(self, partition: int, payload: bytes) -> tuple[str, bytes]:
        """The id of the key used, and what to store."""
        if self.current is None:
            raise self.missing
        nonce = os.urandom(NONCE)
        return self.current, nonce + self._ciphers[self.current].encrypt(nonce, payload, partition.to_bytes(8, "big"))

    def open(self, partition: int, key_id: str, stored: bytes) -> bytes:
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise MissingKey(f"a message is encrypted with key '{key_id}', which this broker does not have")
        try:
            return cipher.decrypt(stored[:NONCE], stored[NONCE:], partition.to_bytes(8, "big"))
        except InvalidTag:
            raise Damaged(
                f"a message encrypted with key '{key_id}' does not open: wrong key or damaged bytes"
            ) from None


def _key(name: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"encryption key '{name}' must be 64 hex digits (32 bytes)")
    return key
