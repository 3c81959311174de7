from __future__ import annotations

import pytest

from perdure.core.errors import ConfigError
from perdure.tasks.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    PieceTokenizer,
    Tokenizer,
    encode_known,
    finished_text,
    vocabulary_of,
)


def test_characters_get_ids_after_the_specials():
    tokenizer = CharTokenizer("ab=")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 5)
    assert tokenizer.encode("b=a") == (3, 4, 2)
    assert tokenizer.decode([3, 0, 4, 1]) == "b="


def test_an_unknown_character_is_named_with_the_alphabet():
    with pytest.raises(ConfigError) as caught:
        CharTokenizer("ab", where="task sort").encode("axbé")
    text = str(caught.value)
    assert text.startswith("task sort: ")
    assert all(part in text for part in ("'xé'", "'ab'", "way out"))


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_has_each_character_once(alphabet: str):
    with pytest.raises(ConfigError, match="alphabet"):
        CharTokenizer(alphabet)


@pytest.mark.parametrize("tokenizer", [CharTokenizer("ab"), ByteTokenizer()])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_the_vocabulary_cannot_be_decoded(tokenizer: Tokenizer, bad: int):
    with pytest.raises(ValueError, match="token ids"):
        tokenizer.decode([2, bad])


def test_digests_tell_tokenizers_apart():
    tokenizers = [CharTokenizer("ab"), CharTokenizer("ba"), ByteTokenizer()]
    assert len({tokenizer.digest for tokenizer in tokenizers}) == 3
    assert CharTokenizer("ab").digest == tokenizers[0].digest


def test_only_a_response_that_ends_once_at_its_end_is_finished():
    tokenizer = CharTokenizer("ab")
    assert finished_text(tokenizer, [2, 3, 1]) == "ab"
    assert finished_text(tokenizer, [1]) == ""
    for unfinished in ([], [2, 3], [2, 1, 3, 1], [2, 0, 1], [2, 9, 1], [-2, 1], [1, 2]):
        assert finished_text(tokenizer, unfinished) is None


def test_bytes_that_are_no_text_still_decode():
    assert ByteTokenizer().decode([2 + 0xFF, 2 + ord("a")]) == "�a"


def test_the_longest_piece_is_one_token():
    tokenizer = PieceTokenizer(["<", "a", "<a>", ">", "."])
    assert tokenizer.encode("<a><a.") == (4, 2, 3, 6)
    assert tokenizer.decode([4, 2, 3, 0, 1]) == "<a><a"
    assert vocabulary_of(tokenizer)["pieces"] == {"<": 2, "a": 3, "<a>": 4, ">": 5, ".": 6}
    with pytest.raises(ConfigError, match="no tokens for all of 'ab'"):
        tokenizer.encode("ab")


@pytest.mark.parametrize("pieces", [["a", "a"], ["a", ""]])
def test_a_piece_is_some_text_and_there_once(pieces: list[str]):
    with pytest.raises(ConfigError, match="occurs twice"):
        PieceTokenizer(pieces)


@pytest.mark.parametrize("tokenizer", [CharTokenizer("ab"), PieceTokenizer(["a", "b"])])
def test_what_has_no_token_can_be_left_out(tokenizer: Tokenizer):
    assert encode_known(tokenizer, "axb") == (2, 3)
