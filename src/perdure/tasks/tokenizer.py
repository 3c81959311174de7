"""Text to token ids and back: one token a character of a fixed alphabet, or one a byte of UTF-8."""

from __future__ import annotations

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
    """What a tokenizer's ids stand for, as JSON: characters, or the first of the 256 bytes."""
    vocabulary: dict[str, object] = {
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "vocab_size": tokenizer.vocab_size,
    }
    if isinstance(tokenizer, CharTokenizer):
        vocabulary["characters"] = {c: tokenizer.encode(c)[0] for c in tokenizer.alphabet}
    else:
        vocabulary["first_byte_id"] = tokenizer.vocab_size - 256
    return vocabulary
