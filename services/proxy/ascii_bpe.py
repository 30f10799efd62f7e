"""Byte-level BPE of ASCII text with the package `tiktoken`, several times faster than `tokenizers`.

Invariant: the ids are those of the `tokenizers` file, or there are none. A text is left to `tokenizers` if it is not
ASCII (so normalizers and Unicode tables play no part), names an added token or is very long; a file, if it is not
byte-level BPE of the plain form with one of the patterns listed here. The two packages have different engines for
regular expressions: these patterns mean the same to both, end at every text and take linear time.

Why the two agree: `tokenizers` merges the first pair in the file's order, `tiktoken` the pair whose union has the
lowest id, and the file's merges have rising ids (else there is no AsciiBpe). `tiktoken` may also join a pair that the
file does not list. But if two neighbours x, y make up a token t, every merge so far was inside t's bytes, as if they
stood alone; and alone they become t through its listed pair only (tokens for which that is not so are left out): x, y
is that pair.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import string
import unicodedata
from typing import Any

import tiktoken
from tokenizers import Tokenizer

log = logging.getLogger("gyre.proxy")

LONGEST = 200_000
"""Characters. `tiktoken`'s regular expressions have a limit on backtracking."""
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that `tokenizers` has built in for byte-level pre-tokenizers (GPT-2 and its followers)."""
_SUFFIX, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset(
    (
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _REST,  # Qwen 2, 2.5, 3
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _REST,  # Qwen 3.5
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _REST,  # Llama 3, GLM 4
    )
)


class AsciiBpe:
    """Made by `of`."""

    def __init__(self, encoding: tiktoken.Encoding, added: re.Pattern[str] | None) -> None:
        self._encoding, self._added = encoding, added

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AsciiBpe | None:
        """The fast form of `tokenizer`; None if it has none."""
        file = json.loads(tokenizer.to_str())
        pattern = _pattern(file)
        if pattern is None or not _plain(file["model"]):
            return None
        added = {token["content"] for token in file["added_tokens"]}
        # A text may be normalized before added tokens are looked for in it.
        added |= {unicodedata.normalize("NFC", content) for content in added}
        ranks = _ranks(tokenizer, file, added)
        if ranks is None:
            return None
        encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        made = cls(encoding, re.compile("|".join(map(re.escape, sorted(added)))) if added else None)
        for text in _samples():
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            if made.encode(text) not in (None, expected):
                log.warning("this model's texts are encoded with the package tokenizers alone: tiktoken differs")
                return None
        return made

    def encode(self, text: str) -> list[int] | None:
        """Ids without special tokens around them; None: ask the tokenizer itself."""
        if len(text) > LONGEST or not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        return self._encoding.encode_ordinary(text)


def _pattern(file: dict[str, Any]) -> str | None:
    """The regular expression that cuts a text into words, if that and bytes are all that comes before the merges."""
    if file["normalizer"] not in (None, {"type": "NFC"}):
        return None
    before = file["pre_tokenizer"] or {}
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    if not steps:
        return None
    *cuts, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or last["use_regex"] == bool(cuts):
        return None
    if not cuts:
        return BYTE_LEVEL
    if len(cuts) > 1 or cuts[0]["type"] != "Split" or cuts[0]["behavior"] != "Isolated" or cuts[0]["invert"]:
        return None
    found: str | None = cuts[0]["pattern"].get("Regex")
    return found if found in PATTERNS else None


def _plain(model: dict[str, Any]) -> bool:
    unusual = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model["type"] == "BPE" and not any(model.get(name) for name in unusual)


def _ranks(tokenizer: Tokenizer, file: dict[str, Any], added: set[str]) -> dict[bytes, int] | None:
    """Bytes of each token -> id, if ids rise with the merges; tokens that no merging reaches are left out."""
    model = file["model"]
    ids: dict[str, int] = model["vocab"]
    products = [ids["".join(pair if isinstance(pair, list) else pair.split(" ", 1))] for pair in model["merges"]]
    if any(b <= a for a, b in itertools.pairwise(products)):
        return None
    byte_of = _bytes_of_characters()
    tokens = {token: i for token, i in ids.items() if all(c in byte_of for c in token)}
    if model.get("ignore_merges"):  # it would hide which tokens are reached
        tokenizer = Tokenizer.from_str(json.dumps(file | {"model": model | {"ignore_merges": False}}))
    merge = tokenizer.model.tokenize
    reached = {token: i for token, i in tokens.items() if [t.id for t in merge(token)] == [i]}
    spelled = {token: bytes(byte_of[c] for c in token) for token in tokens}
    others = {bytes_ for token, bytes_ in spelled.items() if token not in reached}
    if model.get("ignore_merges") and others - {content.encode() for content in added}:
        return None  # a word that is one of them would become it without merging
    if sum(len(token) == 1 for token in reached) < len(byte_of):
        return None
    return {spelled[token]: i for token, i in reached.items()}


def _bytes_of_characters() -> dict[str, int]:
    """What byte-level BPE files write for bytes: printable Latin-1 as it is, for the others U+0100 and on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _samples() -> list[str]:
    rng = random.Random(0)
    words = [
        "don't",
        "I'LL",
        "it's ",
        "x=1",
        "  ",
        "\n",
        "\r\n\r\n",
        "\t",
        " \n ",
        "12345",
        "Abc",
        "__init__",
        "?!",
        "\x1f\x00",
    ]
    mixed = ["".join(rng.choices(words, k=200)) for _ in range(4)]
    return [*mixed, *("".join(rng.choices(string.printable, k=400)) for _ in range(4))]
