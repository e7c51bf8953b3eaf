"""Token by token, the text equals the tokenizer's own decode of all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.actors.text.token_bytes import byte_rules
from ringcast.actors.text.token_decoder import TokenDecoders

PEOPLE = "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 한국어 日本語 العربية देवनागरी 🇫🇷\n\t  x"
scraps = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=PEOPLE, max_size=12),
    st.sampled_from(["The quick", " dog", "  ", "<s>", "</s>", "<tool>", "ab cd", "▁", "é"]),
    st.lists(st.integers(0, 10_000), max_size=6),
)
examples = settings(max_examples=60, deadline=None)


def ids_of(tokenizer: TextTokenizer, parts: list[str | list[int]]) -> list[int]:
    """Token ids, mostly of texts, some at random, a few of them out of the vocabulary."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part)
        else:
            ids += [i % (tokenizer.vocab_size + 3) for i in part]
    return ids


def decoded(tokenizer: TextTokenizer, ids: list[int], skip: bool) -> list[str]:
    decoder = TokenDecoders(tokenizer).open(skip)
    return [*(decoder.feed(i) for i in ids), decoder.end()]


@examples
@given(parts=st.lists(scraps, max_size=8), skip=st.booleans())
def test_pieces_add_up_to_the_tokenizers_own_decode(
    by_bytes: TextTokenizer, parts: list[str | list[int]], skip: bool
) -> None:
    ids = ids_of(by_bytes, parts)
    whole = by_bytes.decode(ids, skip)
    text = "".join(decoded(by_bytes, ids, skip))
    if "\ufffd" not in whole:
        assert text == whole
    else:
        # In a run of byte tokens that is no UTF-8 the library replaces valid characters as well.
        shown = [i for i in ids if not skip or i not in by_bytes.special_token_ids]
        data = b"".join(map(TokenDecoders(by_bytes).bytes_of, shown))
        expected = data.decode(errors="replace")
        assert text in (expected, expected.removeprefix(" "))


@examples
@given(parts=st.lists(scraps, max_size=8), skip=st.booleans())
def test_invalid_bytes_are_replaced_as_the_tokenizer_does(
    byte_level: TextTokenizer, parts: list[str | list[int]], skip: bool
) -> None:
    ids = ids_of(byte_level, parts)
    assert "".join(decoded(byte_level, ids, skip)) == byte_level.decode(ids, skip)


@examples
@given(text=st.text(max_size=30) | st.text(alphabet=PEOPLE, max_size=30))
def test_characters_come_whole(by_bytes: TextTokenizer, text: str) -> None:
    ids = by_bytes.encode(text)
    whole = by_bytes.decode(ids)
    pieces = decoded(by_bytes, ids, True)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole
    assert "".join(pieces) == whole


def test_invalid_bytes_of_byte_tokens(llama_like: TextTokenizer) -> None:
    byte = {i: llama_like.backend.token_to_id(f"<0x{i:02X}>") for i in range(256)}
    a = llama_like.backend.token_to_id("a")
    assert decoded(llama_like, [byte[0xE4], byte[0xBD], a], True) == ["", "", "\ufffda", ""]
    assert decoded(llama_like, [a, byte[0xE4], byte[0xBD]], True) == ["a", "", "", "\ufffd"]
    assert decoded(llama_like, [byte[0xE4], byte[0xBD], byte[0xA0]], True) == ["", "", "你", ""]


def test_special_tokens_do_not_split_a_character(byte_level: TextTokenizer) -> None:
    first, *rest = byte_level.encode("🦊")
    bos = byte_level.backend.token_to_id("<s>")
    assert "".join(decoded(byte_level, [first, bos, *rest], True)) == "🦊"


def test_first_blank(llama_like: TextTokenizer) -> None:
    ids = llama_like.encode("The dog")
    assert llama_like.decode(ids) == "The dog"
    assert "".join(decoded(llama_like, ids, True)) == "The dog"
    assert "".join(decoded(llama_like, ids, False)) == "<s> The dog"


def test_several_first_blanks(llama_like: TextTokenizer) -> None:
    backend = Tokenizer.from_str(llama_like.backend.to_str())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    tokenizer = TextTokenizer(backend)
    blank, a = backend.token_to_id("▁"), backend.token_to_id("a")
    for ids in ([blank, blank, blank, a], [blank, a, blank, a], [a, blank, blank]):
        assert "".join(decoded(tokenizer, ids, True)) == tokenizer.decode(ids)


@examples
@given(ids=st.lists(st.integers(0, 20), max_size=12), skip=st.booleans())
def test_the_library_decodes_what_is_not_by_token(
    word_piece: TextTokenizer, ids: list[int], skip: bool
) -> None:
    assert byte_rules(word_piece.backend) is None
    assert "".join(decoded(word_piece, ids, skip)) == word_piece.decode(ids, skip)


def test_bytes_of_one_token(
    byte_level: TextTokenizer, llama_like: TextTokenizer, word_piece: TextTokenizer
) -> None:
    fox = byte_level.encode("🦊")
    assert b"".join(TokenDecoders(byte_level).bytes_of(i) for i in fox) == "🦊".encode()
    bos = llama_like.backend.token_to_id("<s>")
    assert TokenDecoders(llama_like).bytes_of(bos) == b"<s>"
    assert TokenDecoders(llama_like).bytes_of(99_999) == b""
    the = llama_like.backend.token_to_id("▁the")
    assert TokenDecoders(llama_like).bytes_of(the) == b" the"
    assert TokenDecoders(word_piece).bytes_of(1) == b"the"


def test_which_decoders_go_token_by_token() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert byte_rules(tokenizer) is None
    replace, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    for stages, by_token in [
        ([decoders.Sequence([decoders.ByteLevel()]), fuse], True),
        ([replace, decoders.ByteFallback(), fuse], True),
        ([replace, fuse, decoders.Strip(" ", 1, 0)], True),
        ([fuse, decoders.Metaspace()], True),
        ([replace, decoders.Strip(" ", 1, 0)], False),  # strips every token
        ([replace, fuse, decoders.Strip(" ", 1, 1)], False),  # needs to know the end
        ([fuse, replace], False),
        ([decoders.ByteFallback(), decoders.Metaspace()], False),
        ([fuse], False),
        ([decoders.BPEDecoder()], False),
    ]:
        tokenizer.decoder = decoders.Sequence(stages)
        assert (byte_rules(tokenizer) is not None) == by_token, stages


@examples
@given(parts=st.lists(scraps, max_size=8), skip=st.booleans())
def test_smollm2(smollm2: TextTokenizer, parts: list[str | list[int]], skip: bool) -> None:
    ids = ids_of(smollm2, parts)
    assert "".join(decoded(smollm2, ids, skip)) == smollm2.decode(ids, skip)


def test_what_continues_a_prompt_keeps_its_first_blank(llama_like: TextTokenizer) -> None:
    ids = llama_like.encode("The dog")
    decoder = TokenDecoders(llama_like).open(skip_special_tokens=True, continues=True)
    assert "".join([*map(decoder.feed, ids), decoder.end()]) == " The dog"
