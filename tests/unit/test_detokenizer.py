"""Detokenising and stop strings, against decoding everything at once."""

import copy
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.detokenizer import MAX_UNSETTLED, AnswerWriter, Detokenizer, StopMatcher

SAMPLES = (
    "Hello, world.",
    "naïve café, señor",
    "日本語のテキストと中文",
    "👩‍👩‍👧 family 🏳️‍🌈 flag",
    " leading space\n\n\ttabs and  doubles",
    "mixed 日本 and é and 🙂!",
)


def byte_level() -> Tokenizer:
    """One token a byte, as in GPT-2's family: every character past ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a marked leading space, and bytes for the rest, as in Llama 2's family."""
    words = ["<unk>", "▁", "▁Hello", ",", "▁world", ".", "a", "n", "c", "f", "▁and", "x", "▁leading", "▁space"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def byte_ids(text: str) -> list[int]:
    """Ids of the byte tokens of `BYTE_FALLBACK` that spell `text`."""
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def word_ids(*words: str) -> list[int]:
    ids = [BYTE_FALLBACK.token_to_id(word) for word in words]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def pieces(tokenizer: Tokenizer, output: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_join_to_the_text_and_are_whole_characters(text: str) -> None:
    found = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_after_any_prompt(prompt: str, text: str) -> None:
    found = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, BYTE_LEVEL.encode(prompt).ids)
    assert "".join(found) == text


@given(st.lists(st.integers(0, 255), max_size=80))
def test_any_bytes_equal_decoding_them_at_once(output: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, output)) == BYTE_LEVEL.decode(output)


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=60))
def test_any_tokens_of_a_byte_fallback_vocabulary_are_survived(output: list[int]) -> None:
    found = "".join(pieces(BYTE_FALLBACK, output))
    # A broken byte makes the decoder take back characters already shown; everything else must be equal.
    whole = BYTE_FALLBACK.decode(output)
    if "\ufffd" not in whole:
        assert found == whole


def test_byte_tokens_show_each_character_when_it_is_complete() -> None:
    found = pieces(BYTE_FALLBACK, byte_ids("日本"))
    assert found == ["", "", "日", "", "", "本", ""]


def test_a_character_shown_stays_when_a_broken_byte_follows() -> None:
    broken = [*byte_ids("日"), *byte_ids("本")[:1], *word_ids("x")]
    assert "".join(pieces(BYTE_FALLBACK, broken)) == "日\ufffdx"


def test_the_prompt_decides_whether_a_leading_space_is_written() -> None:
    output = word_ids("▁world", ".")
    assert "".join(pieces(BYTE_FALLBACK, output)) == "world."
    assert "".join(pieces(BYTE_FALLBACK, output, word_ids("▁Hello", ","))) == " world."
    # Special tokens at the prompt's end have no text: what stands before them counts.
    ends = [BYTE_FALLBACK.get_vocab_size() - 1] * 6
    assert "".join(pieces(BYTE_FALLBACK, output, word_ids("▁Hello", ",") + ends)) == " world."


def test_a_prompt_that_ends_inside_a_character_is_not_echoed() -> None:
    prompt = BYTE_LEVEL.encode("abc 日").ids[:-1]
    assert "abc" not in "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode("xyz").ids, prompt))


def test_an_incomplete_character_at_the_end_is_written_once() -> None:
    output = BYTE_LEVEL.encode("ok 🙂").ids[:-1]
    found = pieces(BYTE_LEVEL, output)
    assert found[:-1] == ["o", "k", " ", "", "", ""]
    assert found[-1] == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    end = BYTE_LEVEL.token_to_id("<end>")
    assert end is not None
    assert "".join(pieces(BYTE_LEVEL, [*BYTE_LEVEL.encode("hi").ids, end, *BYTE_LEVEL.encode("!").ids])) == "hi!"


def test_text_is_not_held_back_for_ever_by_bytes_that_are_no_character() -> None:
    broken = BYTE_LEVEL.encode("🙂").ids[0]
    detokenizer = Detokenizer(BYTE_LEVEL)
    found = [detokenizer.push(broken) for _ in range(MAX_UNSETTLED)]
    assert found[-1] == "\ufffd" * MAX_UNSETTLED


def by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule of `StopMatcher`, said plainly."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def cut(text: str, sizes: list[int]) -> Iterator[str]:
    start = 0
    for size in sizes:
        yield text[start : start + size]
        start += size
    yield text[start:]


@example(text="bbabca", stops=["abca", "c"], sizes=[])
@example(text="bbabca", stops=["abc", "bc", "ca"], sizes=[3, 1])
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=12),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher, shown, stopped = StopMatcher(stops), "", False
    expected, expected_stop = by_character(text, stops)
    for piece in cut(text, sizes):
        scan = matcher.push(piece)
        shown += scan.text
        # Nothing shown is ever taken back.
        assert expected.startswith(shown)
        stopped = scan.stopped
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == (expected, expected_stop)


def test_only_a_possible_start_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("one #") == ("one ", False)
    assert matcher.push("#") == ("", False)
    assert matcher.push(" two") == ("## two", False)
    assert matcher.push(" ##") == (" ", False)
    assert matcher.push("# three") == ("", True)


def test_tokens_after_a_stop_string_are_not_part_of_the_answer() -> None:
    ids = BYTE_LEVEL.encode("yes. STOP and more").ids
    written = AnswerWriter(BYTE_LEVEL, [], ["STOP"]).write(ids)
    assert written == ("yes. ", len("yes. STOP"), True)


def test_the_last_piece_writes_what_was_held_back() -> None:
    writer = AnswerWriter(BYTE_LEVEL, [], ["STOP"])
    assert writer.write(BYTE_LEVEL.encode("a ST").ids) == ("a ", 4, False)
    assert writer.write(BYTE_LEVEL.encode("É").ids[:1], final=True) == ("ST\ufffd", 1, False)


def test_a_stop_token_is_counted_and_not_written() -> None:
    ids = BYTE_LEVEL.encode("done!").ids
    written = AnswerWriter(BYTE_LEVEL, [], []).write(ids, silent_last=True, final=True)
    assert written == ("done", 5, False)


def test_a_stop_string_of_characters_spread_over_tokens() -> None:
    writer = AnswerWriter(BYTE_LEVEL, [], ["終"])
    shown = ""
    for token_id in BYTE_LEVEL.encode("本文終余").ids:
        written = writer.write([token_id])
        shown += written.text
        if written.stopped:
            break
    assert shown == "本文"


def test_the_tokenizer_is_shared_unchanged() -> None:
    before = copy.deepcopy(BYTE_LEVEL).to_str()
    pieces(BYTE_LEVEL, BYTE_LEVEL.encode("日本").ids)
    assert BYTE_LEVEL.to_str() == before
