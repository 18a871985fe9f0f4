"""Key agreement, key derivation, mask streams, authenticated encryption and signatures, all of the
package `cryptography`: X25519, HKDF-SHA-256, AES-256 in counter mode, ChaCha20-Poly1305, Ed25519.

Every key is used for one thing in one round: what it is derived for is part of its derivation.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

KEY = 32
SIGNATURE = 64
TAG = 16

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag

    # Some of the others import it when they are first used, and a server has no descriptor for that
    # once it listens.
    from cryptography.hazmat.backends import openssl  # noqa: F401
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:  # reported by the configuration's check, see `missing`
    _here = False
else:
    _here = True


def missing() -> bool:
    """Whether the package is not installed."""
    return not _here


def public_key(secret: bytes) -> bytes:
    """Returns the public half of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def shared_key(secret: bytes, other: bytes, purpose: bytes) -> bytes:
    """Returns a key that only the holders of the two secrets have (X25519, then HKDF). Raises
    ValueError for a public key that gives none.
    """
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(other)
    )
    return derive(shared, purpose)


def is_public_key(key: bytes) -> bool:
    """Whether this is a public key of X25519 that gives a shared key: not one of low order."""
    try:
        shared_key(bytes(KEY - 1) + b"\x40", key, b"")
    except ValueError:
        return False
    return True


def derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY, salt=None, info=b"fednet secagg " + purpose).derive(secret)


def mask_stream(key: bytes, n: int, width: int) -> npt.NDArray[np.uint64]:
    """Returns n residues below 2^(8 width): AES-256 in counter mode. The key is used for this
    alone, so the counter starts at 0.
    """
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    size = 4 if width <= 4 else 8
    words = np.frombuffer(cipher.update(bytes(n * size)), f"<u{size}").astype(np.uint64)
    return words if width == 8 else words & np.uint64((1 << (8 * width)) - 1)


def encrypt(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypts and authenticates a text, and authenticates `about`. A key encrypts one text, so the
    nonce is 0.
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def decrypt(key: bytes, text: bytes, about: bytes) -> bytes | None:
    """Returns the text; None if it was not encrypted with this key and this `about`."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), text, about)
    except InvalidTag:
        return None


def signing_public_key(secret: bytes) -> bytes:
    """Returns the public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, text: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def commitment(secret: bytes) -> bytes:
    """Returns a digest by which a secret is recognized. It reveals nothing of a secret of full
    entropy.
    """
    return hashlib.sha256(b"fednet secagg commitment " + secret).digest()
