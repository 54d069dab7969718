"""Tokenizers of the `tokenizers` library: from a file, for plain bytes, or trained on a text.

Every tokenizer has an end-of-text token, which text alone never produces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from isles.train import text

END_OF_TEXT = text.SEPARATOR
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
"""What end-of-text is called in tokenizer files, in the order of search."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library with an end-of-text token, which text alone can never produce."""

    def __init__(self, library: tokenizers.Tokenizer, name: str) -> None:
        self.json = library.to_str()
        vocabulary = library.get_vocab(with_added_tokens=True)
        ends = [vocabulary[end] for end in END_NAMES if end in vocabulary]
        if not ends:
            raise ValueError(f"tokenizer {name} has no end-of-text token: add one of {', '.join(END_NAMES)} to it")
        self.vocabulary = max(vocabulary.values()) + 1
        self.end_of_text = ends[0]
        self._is_bytes = self.json == _bytes_json()
        self._library = library
        library.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        library.no_truncation()
        library.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        if self._is_bytes:  # the library gives the same, a hundred times slower
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes" (256 bytes and end-of-text), or one from a file (or a folder with a tokenizer.json)."""
    if name == "bytes":
        return Tokenizer(tokenizers.Tokenizer.from_str(_bytes_json()), name)
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f'tokenizer {name!r} not found: give a tokenizers JSON file, "bytes", or none to train one')
    return tokenizer_from(path.read_bytes(), name)


def tokenizer_from(data: bytes, name: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer in the bytes of such a file."""
    try:
        library = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer {name!r} is not a JSON file of the tokenizers library ({error})") from error
    return Tokenizer(library, name)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` tokens (fewer where the text has no more to merge); end-of-text is token 0."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(library, "trained")


def _bytes_json() -> str:
    # ByteLevel writes a byte as a printable character: itself where it is one, else the next from code 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    return library.to_str()
