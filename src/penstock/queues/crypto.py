"""Encrypt payloads and headers at rest with AES-256-GCM. The database never sees the plaintext.

A stored payload of an encrypted queue is

    byte 0..11    nonce, random
    byte 12..     ciphertext, then the 16 bytes of the tag

The associated data are the partition's number (8 bytes, big-endian): a ciphertext that is moved to
another partition cannot be decrypted. In a buffer file, the partition has no number yet; there they
are a JSON array of queue, partition and transaction id. Headers are encrypted separately in the
same form, with `headers` appended to the associated data, so that they cannot pass for a payload.

The id of the key is stored with the message, so keys can rotate: the last configured key encrypts,
the others only decrypt. Without a key, an encrypted queue refuses pushes; plaintext is not stored.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.config.schema import QueuesSettings as Settings
from penstock.errors import ConfigError, Damaged, MissingKey
from penstock.protocol.headers import decode
from penstock.queues.types import Item

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SINGLE = "default"  # the id of a key that is configured without an id
NONCE = 12
HEADERS = b"headers"


class Encrypted(NamedTuple):
    """The encrypted parts of a message, as stored."""

    key_id: str
    payload: bytes
    headers: bytes | None


class EncryptionKeys:
    def __init__(self, settings: Settings) -> None:
        configured = dict(settings.encryption_keys)
        if settings.encryption_key:
            configured = {SINGLE: settings.encryption_key} | configured
        self._ciphers = {name: _cipher(name, digits) for name, digits in configured.items()}
        self.current = next(reversed(configured), None)

    @property
    def missing(self) -> MissingKey:
        return MissingKey(
            "this queue is encrypted and the broker has no encryption key (queues.encryption_key)"
        )

    def encrypt(self, partition: int, item: Item) -> Encrypted:
        return self._encrypt(partition.to_bytes(8, "big"), item)

    def decrypt(self, partition: int, key_id: str, stored: bytes) -> bytes:
        return self._decrypt(partition.to_bytes(8, "big"), key_id, stored)

    def decrypt_headers(self, partition: int, key_id: str, stored: bytes) -> bytes:
        return self._decrypt(partition.to_bytes(8, "big") + HEADERS, key_id, stored)

    def payload_of(self, row: Any) -> Any:
        """Return the decrypted payload of a row; None if the row has none."""
        stored = row["payload"]
        if stored is None or row["key_id"] is None:
            return stored
        return self.decrypt(row["partition_id"], row["key_id"], stored)

    def headers_of(self, row: Any) -> dict[str, str] | None:
        """Return the decrypted headers of a row; None if the row has none."""
        stored = row["headers"]
        if stored is not None and row["key_id"] is not None:
            stored = self.decrypt_headers(row["partition_id"], row["key_id"], stored)
        return None if stored is None else decode(stored)

    def encrypt_item(self, item: Item) -> Item:
        """Return an encrypted copy of the item, for a buffer file."""
        encrypted = self._encrypt(_context(item), item)
        return msgspec.structs.replace(
            item, payload=encrypted.payload, headers=encrypted.headers, key_id=encrypted.key_id
        )

    def decrypt_item(self, item: Item) -> Item:
        if item.key_id is None:
            return item
        context, headers = _context(item), item.headers
        payload = self._decrypt(context, item.key_id, item.payload)
        if headers is not None:
            headers = self._decrypt(context + HEADERS, item.key_id, headers)
        return msgspec.structs.replace(item, payload=payload, headers=headers, key_id=None)

    def _encrypt(self, context: bytes, item: Item) -> Encrypted:
        if self.current is None:
            raise self.missing
        encrypt, nonce = self._ciphers[self.current].encrypt, os.urandom(NONCE)
        payload, headers = nonce + encrypt(nonce, item.payload, context), item.headers
        if headers is not None:
            nonce = os.urandom(NONCE)
            headers = nonce + encrypt(nonce, headers, context + HEADERS)
        return Encrypted(self.current, payload, headers)

    def _decrypt(self, context: bytes, key_id: str, stored: bytes) -> bytes:
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise MissingKey(
                f"a message is encrypted with key '{key_id}', which this broker does not have"
            )
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(stored[:NONCE], stored[NONCE:], context)
        except (InvalidTag, ValueError):  # ValueError: the nonce is cut short
            raise Damaged(
                f"a message cannot be decrypted with key '{key_id}': wrong key or damaged bytes"
            ) from None


def _context(item: Item) -> bytes:
    return msgspec.json.encode([item.queue, item.partition, item.transaction_id])


def _cipher(name: str, digits: str) -> "AESGCM":
    # Imported here to save 9 MiB in a broker without keys.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_key(name, digits))


def _key(name: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"encryption key '{name}' must be 64 hex digits (32 bytes)")
    return key
