"""The text of a run: what all islands are evaluated on, and what each is trained on."""

from __future__ import annotations

from collections.abc import Callable

from isles.train.config import TrainConfig
from isles.train.tokens import TokenSet, prepare


def prepare_data(
    config: TrainConfig, island: int, say: Callable[[str], None] = lambda line: None
) -> tuple[TokenSet, TokenSet]:
    """The tokens of the run, and those that an island trains on: the same, unless islands have sources of their own.

    With sources of their own, --data (default: all of them together) gives the tokenizer and the validation text.
    """
    sources = config.island_sources()
    together = ",".join(sources) if sources and config.data == TrainConfig.data else config.data
    tokens = prepare(
        together,
        tokenizer=config.tokenizer or None,
        vocabulary=config.vocabulary,
        validation=config.val_data or None,
        say=say,
    )
    if not sources:
        return tokens, tokens
    own = prepare(sources[island], tokenizer=str(tokens.tokenizer_file), validation=config.val_data or None, say=say)
    return tokens, own
