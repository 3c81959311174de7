"""Text to token ids and back: tokens are pieces of text from a fixed list, or bytes of UTF-8."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from perdure.core.digests import digest_values
from perdure.core.errors import ConfigError

PAD_ID = 0
EOS_ID = 1
_SPECIALS = 2

VOCABULARY_FILE = "vocabulary.json"
"""Beside an exported model: what its token ids stand for."""


class Tokenizer(Protocol):
    """A reversible mapping. Ids 0 and 1 are padding and end of sequence; they stand for no text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hex fingerprint of the mapping."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, without specials.

        Raises:
            ConfigError: A character has no token.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; specials are left out.

        Raises:
            ValueError: An id is not below ``vocab_size`` or is negative.
        """
        ...


class CharTokenizer:
    """One token a character.

    Args:
        alphabet: The characters in the order of their ids, none twice.
        where: What the alphabet belongs to, named in errors.
    """

    def __init__(self, alphabet: str, *, where: str = "tokenizer") -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ConfigError(
                f"alphabet {alphabet!r} is empty or has a character twice",
                where=where,
                rule="every character of the alphabet is one token",
                way_out="list each character once",
            )
        self.alphabet = alphabet
        self.vocab_size = _SPECIALS + len(alphabet)
        self.pad_id = PAD_ID
        self.eos_id = EOS_ID
        self.digest = digest_values(["char", PAD_ID, EOS_ID, alphabet])
        self._where = where
        self._ids = {character: _SPECIALS + i for i, character in enumerate(alphabet)}
        self._texts = ("", "", *alphabet)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``. Raises ``ConfigError`` if a character is not in the alphabet."""
        try:
            return tuple([self._ids[character] for character in text])
        except KeyError:
            unknown = "".join(sorted(set(text) - set(self.alphabet)))
            raise ConfigError(
                f"no token for {unknown!r} in {text[:60]!r}",
                where=self._where,
                rule=f"the alphabet is {self.alphabet!r}",
                way_out="add the missing characters to the alphabet or leave them out of the text",
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; padding and end of sequence are left out."""
        return "".join([self._texts[i] for i in _checked(ids, self.vocab_size)])


class PieceTokenizer:
    """One token a piece of text: characters, and words or tags that are one token each.

    Where several pieces fit, the longest is taken.

    Args:
        pieces: In the order of their ids, none empty or twice.
        where: What the pieces belong to, named in errors.
    """

    def __init__(self, pieces: Sequence[str], *, where: str = "tokenizer") -> None:
        if not all(pieces) or len(set(pieces)) != len(pieces):
            raise ConfigError(
                "a piece is empty or occurs twice",
                where=where,
                rule="every piece is one token",
                way_out="list each piece once",
            )
        self.pieces = tuple(pieces)
        self.vocab_size = _SPECIALS + len(pieces)
        self.pad_id = PAD_ID
        self.eos_id = EOS_ID
        self.digest = digest_values(["pieces", PAD_ID, EOS_ID, list(pieces)])
        self._where = where
        self._ids = {piece: _SPECIALS + i for i, piece in enumerate(pieces)}
        longest_first = sorted(pieces, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)), re.DOTALL)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``. Raises ``ConfigError`` if some of it is no piece."""
        found = self._split.findall(text)
        if sum(map(len, found)) != len(text):
            raise ConfigError(
                f"no tokens for all of {text[:60]!r}",
                where=self._where,
                rule=f"the pieces are {' '.join(self.pieces)}",
                way_out="add the missing characters to the pieces or leave them out of the text",
            )
        return tuple([self._ids[piece] for piece in found])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; padding and end of sequence are left out."""
        texts = ("", "", *self.pieces)
        return "".join([texts[i] for i in _checked(ids, self.vocab_size)])


class ByteTokenizer:
    """One token a byte of UTF-8: every text has tokens. Other bytes decode to U+FFFD."""

    def __init__(self) -> None:
        self.vocab_size = _SPECIALS + 256
        self.pad_id = PAD_ID
        self.eos_id = EOS_ID
        self.digest = digest_values(["bytes", PAD_ID, EOS_ID])

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of the UTF-8 bytes of ``text``."""
        return tuple([_SPECIALS + byte for byte in text.encode()])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; padding and end of sequence are left out."""
        checked = _checked(ids, self.vocab_size)
        return bytes([i - _SPECIALS for i in checked if i >= _SPECIALS]).decode(errors="replace")


def _checked(ids: Sequence[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}")
    return checked


def encode_known(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of ``text``; without the characters that have no token, if some have none."""
    try:
        return tokenizer.encode(text)
    except ConfigError:
        return tuple([i for character in text for i in _encoded(tokenizer, character)])


def _encoded(tokenizer: Tokenizer, character: str) -> tuple[int, ...]:
    try:
        return tokenizer.encode(character)
    except ConfigError:
        return ()


def finished_text(tokenizer: Tokenizer, response_ids: Sequence[int]) -> str | None:
    """Text of a response that is finished, else None.

    Finished means: one end-of-sequence token, at the end, and no padding or unknown id before it.
    """
    ids = [int(i) for i in response_ids]
    if not ids or ids[-1] != tokenizer.eos_id:
        return None
    body = ids[:-1]
    if any(i in (tokenizer.pad_id, tokenizer.eos_id) for i in body):
        return None
    if body and not 0 <= min(body) <= max(body) < tokenizer.vocab_size:
        return None
    return tokenizer.decode(body)


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, object]:
    """What a tokenizer's ids stand for, as JSON: characters, pieces, or the first of 256 bytes."""
    vocabulary: dict[str, object] = {
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "vocab_size": tokenizer.vocab_size,
    }
    if isinstance(tokenizer, PieceTokenizer):
        vocabulary["pieces"] = {piece: tokenizer.encode(piece)[0] for piece in tokenizer.pieces}
    elif isinstance(tokenizer, CharTokenizer):
        vocabulary["characters"] = {c: tokenizer.encode(c)[0] for c in tokenizer.alphabet}
    else:
        vocabulary["first_byte_id"] = tokenizer.vocab_size - 256
    return vocabulary
