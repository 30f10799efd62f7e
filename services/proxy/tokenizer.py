"""A Hugging Face folder's tokenizer, read with the package `tokenizers`, and with `tiktoken` where that gives the same.

Invariant: the same ids and texts as transformers' fast tokenizer for the same folder, at a fraction of its cost per
call, and without importing torch into the proxy. It offers no character offsets, which the proxy does not need.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.proxy.ascii_bpe import AsciiBpe

# One text at a time: the library's own threads would only add hops between them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHORT = 64
"""Characters up to which a text's ids are remembered: a turn's scaffolding is the same few texts."""
SHORT_KEPT = 4096


class FastTokenizer:
    """What the package renderers asks of a tokenizer (its `Tokenizer` protocol)."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ascii = AsciiBpe.of(self._tokenizer)
        self.added_ids = frozenset(self._tokenizer.get_added_tokens_decoder())
        config = folder / "tokenizer_config.json"
        fields = json.loads(config.read_bytes()) if config.is_file() else {}
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = self._special(fields.get("unk_token"))
        self.eos_token_id: int | None = self._special(fields.get("eos_token"))
        self._short = functools.lru_cache(SHORT_KEPT)(self._encode)

    def _special(self, token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if content else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= SHORT:
            return list(self._short(text, add_special_tokens))
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._ascii is not None and not add_special_tokens and (quick := self._ascii.encode(text)) is not None:
            return quick
        # The batch form leaves out character offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(t) for t in tokens]
        found = self._tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found


class StandIns:
    """A FastTokenizer for a renderer that only passes encoded texts on: inside `deferring`, each long text gets
    one negative id in place of its ids. A renderer keeps several lists with an entry per id, and
    would take longer over them than the encoding takes."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._here = threading.local()  # renderings run in threads, too

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[Callable[[list[int]], list[int]]]:
        """Gives what puts the texts' ids in."""
        texts: list[list[int]] = []
        self._here.texts = texts
        try:
            yield lambda ids: _filled(ids, texts)
        finally:
            self._here.texts = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens)
        texts: list[list[int]] | None = getattr(self._here, "texts", None)
        if texts is None or len(text) <= SHORT:
            return ids
        texts.append(ids)
        return [-len(texts)]


def _filled(ids: list[int], texts: list[list[int]]) -> list[int]:
    out: list[int] = []
    for token in ids:
        if token < 0:
            out += texts[-token - 1]
        else:
            out.append(token)
    return out


def load_tokenizer(model_path: str) -> Any:
    """FastTokenizer where the folder has a tokenizer.json; else what the package renderers loads."""
    folder = Path(model_path)
    if (folder / "tokenizer.json").is_file():
        return FastTokenizer(folder)
    from renderers.base import load_tokenizer as load_with_transformers

    return load_with_transformers(model_path)
