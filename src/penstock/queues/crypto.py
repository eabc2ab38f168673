"""Encryption at rest of payloads: AES-256-GCM, done here, so that the database never sees the clear
text.

A stored payload of an encrypted queue is

    byte 0..11    nonce, random
    byte 12..     ciphertext, then the 16 bytes of the tag

with the partition's number (8 bytes, big-endian) as associated data: a ciphertext moved to another
partition does not open. In a buffer file, where the partition has no number yet, the associated
data are the names of queue and partition and the transaction id, as a JSON array. The id of the key
is stored beside it, so keys can rotate: the last configured one encrypts, the others still open
what they sealed. Without a key a queue that asks for encryption refuses pushes; clear text is never
stored instead.
"""

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.config.schema import Queues as Settings
from penstock.errors import ConfigError, Damaged, MissingKey
from penstock.queues.types import Item

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
        return MissingKey(
            "this queue is encrypted and the broker has no encryption key (queues.encryption_key)"
        )

    def seal(self, partition: int, payload: bytes) -> tuple[str, bytes]:
        """The id of the key used, and what to store."""
        return self._seal(partition.to_bytes(8, "big"), payload)

    def open(self, partition: int, key_id: str, stored: bytes) -> bytes:
        return self._open(partition.to_bytes(8, "big"), key_id, stored)

    def seal_item(self, item: Item) -> Item:
        """The item as it may lie in a buffer file."""
        key_id, payload = self._seal(_context(item), item.payload)
        return msgspec.structs.replace(item, payload=payload, key_id=key_id)

    def open_item(self, item: Item) -> Item:
        if item.key_id is None:
            return item
        payload = self._open(_context(item), item.key_id, item.payload)
        return msgspec.structs.replace(item, payload=payload, key_id=None)

    def _seal(self, context: bytes, payload: bytes) -> tuple[str, bytes]:
        if self.current is None:
            raise self.missing
        nonce = os.urandom(NONCE)
        return self.current, nonce + self._ciphers[self.current].encrypt(nonce, payload, context)

    def _open(self, context: bytes, key_id: str, stored: bytes) -> bytes:
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise MissingKey(
                f"a message is encrypted with key '{key_id}', which this broker does not have"
            )
        try:
            return cipher.decrypt(stored[:NONCE], stored[NONCE:], context)
        except (InvalidTag, ValueError):  # ValueError: too short to have a nonce
            raise Damaged(
                f"a message encrypted with key '{key_id}' does not open: wrong key or damaged bytes"
            ) from None


def _context(item: Item) -> bytes:
    return msgspec.json.encode([item.queue, item.partition, item.transaction_id])


def _key(name: str, digits: str) -> bytes:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"encryption key '{name}' must be 64 hex digits (32 bytes)")
    return key
