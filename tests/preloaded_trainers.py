"""As `tests.preloaded`, where tests of trainers are among those that run: the libraries take seconds to import."""

import importlib

NAMES = {
    "transformers": ("Trainer", "TrainingArguments", "GPT2LMHeadModel", "get_scheduler"),
    "peft": ("LoraConfig", "get_peft_model"),
    "lightning.pytorch": ("Trainer",),
}

for library, names in NAMES.items():
    for name in names:
        getattr(importlib.import_module(library), name)  # some load a part when it is first used
