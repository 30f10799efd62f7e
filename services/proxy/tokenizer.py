"""A Hugging Face folder's tokenizer, read with the package `tokenizers` alone.

Invariant: the same ids and texts as transformers' fast tokenizer for the same folder, at a fraction of its cost per
call, and without importing torch into the proxy. It offers no character offsets, which the proxy does not need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class FastTokenizer:
    """What the package renderers asks of a tokenizer (its `Tokenizer` protocol)."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.added_ids = frozenset(self._tokenizer.get_added_tokens_decoder())
        config = folder / "tokenizer_config.json"
        fields = json.loads(config.read_bytes()) if config.is_file() else {}
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = self._special(fields.get("unk_token"))
        self.eos_token_id: int | None = self._special(fields.get("eos_token"))

    def _special(self, token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if content else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(t) for t in tokens]
        found = self._tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found


def load_tokenizer(model_path: str) -> Any:
    """FastTokenizer where the folder has a tokenizer.json; else what the package renderers loads."""
    folder = Path(model_path)
    if (folder / "tokenizer.json").is_file():
        return FastTokenizer(folder)
    from renderers.base import load_tokenizer as load_with_transformers

    return load_with_transformers(model_path)
