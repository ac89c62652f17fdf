"""Secret randomness of our own, out of reach of ``seed_everything`` and never stored.

One run draws one 256-bit key from the operating system. From it every purpose (sampling, noise) derives its own key,
and every update reads its own stretch of an AES-256 counter stream. Nothing depends on the state of a generator, so
no state can be saved, restored or shared by mistake, and noise cannot repeat after a resume.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lightning_dp import _validate

KEY_BYTES = 32

Purpose = Literal["sampling", "noise", "release"]


def secret_key() -> bytes:
    """A fresh 256-bit key from the operating system."""
    return os.urandom(KEY_BYTES)


def insecure_key(seed: int, run: int = 0) -> bytes:
    """A key that anyone who knows ``seed`` can compute, different for each ``run``. For tests only."""
    _validate.integer("seed", seed, minimum=0)
    return hashlib.blake2b(f"insecure:{seed}:{run}".encode(), digest_size=KEY_BYTES).digest()


class KeyStream:
    """An addressable stream of secret random bits: AES-256 in counter mode (NIST SP 800-38A).

    Args:
        key: 32 secret bytes.
        purpose: What the stream is used for. Streams of one key and different purposes are independent.
    """

    def __init__(self, key: bytes, purpose: Purpose) -> None:
        # PRIVACY: one key per purpose, so that publishing what one stream produced says nothing about another.
        self._cipher = algorithms.AES(hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES).digest())

    def words(self, index: int, count: int) -> npt.NDArray[np.uint64]:
        """Returns ``count`` uniform 64-bit words of the stretch number ``index`` (0 .. 2**64 - 1).

        The same index always gives the same words; different indices never overlap.
        """
        nonce = index.to_bytes(8, "big") + bytes(8)
        encryptor = Cipher(self._cipher, modes.CTR(nonce)).encryptor()
        return np.frombuffer(bytearray(encryptor.update(bytes(8 * count))), dtype=np.uint64)

    def blocks(self, index: int, count: int) -> Iterator[npt.NDArray[np.uint64]]:
        """The same words as :meth:`words`, ``count`` at a time and without end; each block overwrites the last one."""
        encryptor = Cipher(self._cipher, modes.CTR(index.to_bytes(8, "big") + bytes(8))).encryptor()
        zeros, filled = bytes(8 * count), bytearray(8 * count + 15)  # the cipher wants room for one block more
        words = np.frombuffer(filled, dtype=np.uint64, count=count)
        while True:
            encryptor.update_into(zeros, filled)
            yield words

    def generator(self, index: int) -> np.random.Generator:
        """A numpy generator keyed by 128 secret bits of the stretch number ``index``."""
        return np.random.Generator(np.random.Philox(key=self.words(index, 2)))
