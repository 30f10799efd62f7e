"""The quick encoding of ASCII text gives the ids of the package tokenizers, whatever the merges and the text."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.proxy.ascii_bpe import LONGEST, PATTERNS, AsciiBpe
from services.proxy.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
ASCII = st.text(st.characters(max_codepoint=127), max_size=300)
PIECES = st.lists(
    st.sampled_from(
        ["don't", "I'LL", "self.x", " = ", "    ", "\n", "\r\n", "\t", "0042", "return", "#!", "<tool", ">>"]
    ),
    max_size=60,
).map("".join)


def trained(cut, normalizer=None, sources=("services/proxy/*.py", "docs/*.md"), vocab=3000):
    """A byte-level BPE made from the project's own text."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|end|>"], initial_alphabet=ALPHABET)
    tokenizer.train([str(path) for pattern in sources for path in ROOT.glob(pattern)], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.fixture(scope="module")
def kinds():
    made = [trained(pre_tokenizers.ByteLevel(add_prefix_space=False))]
    made += [trained(split(pattern), normalizers.NFC()) for pattern in sorted(PATTERNS)]
    return [(tokenizer, AsciiBpe.of(tokenizer)) for tokenizer in made]


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@settings(deadline=None, max_examples=150)
@given(text=ASCII | PIECES)
def test_any_ascii_text_has_the_same_ids(kinds, text):
    for tokenizer, quick in kinds:
        assert quick is not None
        ids = quick.encode(text)
        assert ids == plain(tokenizer, text)


def test_the_projects_own_files_have_the_same_ids_and_are_taken(kinds):
    texts = [path.read_text() for path in sorted(ROOT.glob("shared/*.py"))]
    for tokenizer, quick in kinds:
        ids = [quick.encode(text) for text in texts]
        assert sum(found is not None for found in ids) > 0.8 * len(texts)
        assert all(found in (None, plain(tokenizer, text)) for found, text in zip(ids, texts, strict=True))


@pytest.mark.parametrize("text", [" " * LONGEST, "\n" * LONGEST, "a" * LONGEST, "!" * LONGEST, " \n" * (LONGEST // 2)])
def test_long_runs_have_the_same_ids(kinds, text):
    for tokenizer, quick in kinds:
        assert quick.encode(text) == plain(tokenizer, text)


@pytest.mark.parametrize("text", ["é", "<|end|>", "a <tool_call> b", "a" * (LONGEST + 1)])
def test_what_needs_the_tokenizer_itself_is_left_to_it(kinds, text):
    assert [quick.encode(text) for _, quick in kinds] == [None] * len(kinds)


@pytest.mark.parametrize("pattern", ["[a-z]+", "q*", r"^a|[\s\S]", "[A-Z]{1,2}+|[^A-Z]+", min(PATTERNS) + "|x"])
def test_a_pattern_that_is_not_listed_has_no_quick_form(pattern):
    assert AsciiBpe.of(trained(split(pattern), vocab=300)) is None


def test_a_file_without_pre_tokenizers_has_no_quick_form():
    assert AsciiBpe.of(trained(pre_tokenizers.Sequence([]), vocab=300)) is None


def test_added_tokens_spelled_like_other_texts_change_nothing():
    tokenizer = of_merges([("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")])
    tokenizer.add_tokens([AddedToken("Ġthe", normalized=False), AddedToken("a\u037e", normalized=True)])
    tokenizer.normalizer = normalizers.NFC()
    quick = AsciiBpe.of(tokenizer)
    assert quick is not None
    assert quick.encode(" the the") == plain(tokenizer, " the the")
    assert quick.encode("Ka; x") is None  # NFC makes the second one "a;"


LETTERS = "abc"


@st.composite
def merges(draw):
    """Merges in any order over three letters; products may be out of reach, or reachable in several ways."""
    tokens, pairs = list(LETTERS), []
    for _ in range(draw(st.integers(1, 12))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if "".join(pair) not in tokens:
            pairs.append(pair)
            tokens.append("".join(pair))
    return pairs


def of_merges(pairs, **fields):
    vocab = {c: i for i, c in enumerate(sorted(ALPHABET))}
    for pair in pairs:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, **fields))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@settings(deadline=None, max_examples=300)
@given(pairs=merges(), text=st.text(LETTERS, max_size=250), whole=st.booleans())
def test_any_merges_give_the_same_ids(pairs, text, whole):
    tokenizer = of_merges(pairs, ignore_merges=whole)
    quick = AsciiBpe.of(tokenizer)
    if quick is None:
        assert whole  # some token is out of reach, and would be taken where a word is that token
    else:
        assert quick.encode(text) == plain(tokenizer, text)


def test_merges_whose_ids_do_not_rise_have_no_quick_form():
    tokenizer = of_merges([("a", "b"), ("b", "c")])
    file = json.loads(tokenizer.to_str())
    file["model"]["merges"].reverse()
    assert AsciiBpe.of(Tokenizer.from_str(json.dumps(file))) is None


def test_word_pieces_have_no_quick_form():
    assert AsciiBpe.of(Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))) is None


def test_the_proxys_tokenizer_takes_it(model_folder, monkeypatch):
    asked = []
    original = AsciiBpe.encode
    monkeypatch.setattr(AsciiBpe, "encode", lambda self, text: asked.append(text) or original(self, text))
    tokenizer, reference = load_tokenizer(str(model_folder)), Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text = "write the file and run the test again, or list the result of one two three"
    assert tokenizer.encode(text, add_special_tokens=False) == plain(reference, text)
    assert asked[-1] == text
