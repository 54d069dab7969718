"""Hugging Face causal language models: `--model hf:WHAT`, where WHAT is

a folder with weights      continues from them
a folder or file with a config.json only      that architecture, freshly initialised
a name                     from the hub, or its local cache
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def load(what: str, vocabulary: int) -> nn.Module:
    """The model; its embedding must have room for every token of the data."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(f"--model hf:{what} needs transformers: pip install 'isles[hf]'") from None
    path = Path(what)
    try:
        if path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors"))):
            config: Any = AutoConfig.from_pretrained(what)
            model = AutoModelForCausalLM.from_config(config)
        else:
            model = AutoModelForCausalLM.from_pretrained(what)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model hf:{what} cannot be loaded: {str(error).splitlines()[0]}") from None
    size = model.get_input_embeddings().num_embeddings
    if size < vocabulary:
        raise ValueError(
            f"--model hf:{what} knows {size} tokens, but the data has {vocabulary}: use --vocabulary {size}"
        )
    return model  # type: ignore[no-any-return]
