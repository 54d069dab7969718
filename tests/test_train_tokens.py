"""Token files: what is in them, and that the cache can be trusted."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from isles.train import text as text_module
from isles.train import tokens as tokens_module
from isles.train.tokens import default_cache, load_tokenizer, prepare

HARD = "def f():\n    return '<|endoftext|>', 'é漢🙂\\x00'\n\n\n\tend  \n"


@pytest.fixture
def source(tmp_path):
    """A file of sixty documents."""
    parts = [f"{HARD}{n} " + "some words and more words, " * (n % 7) + f"{n * n}\n" for n in range(60)]
    file = tmp_path / "source.txt"
    file.write_bytes("<|endoftext|>\n".join(parts).encode())
    return str(file)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def made(source, cache, **options):
    """The set, and whether it had to be tokenised."""
    said = []
    tokens = prepare(source, cache=cache, say=said.append, **{"vocabulary": 300, **options})
    return tokens, any(line.startswith("tokenising") for line in said)


def decoded(tokens, stream):
    """The documents of a token stream; checks that each stands between two end-of-text tokens."""
    end = tokens.end_of_text
    assert stream[0] == end
    assert stream[-1] == end
    places = np.flatnonzero(stream == end)
    assert len(places) % 2 == 0
    assert (np.diff(places)[1::2] == 1).all()
    return [tokens.decode(stream[a + 1 : b]) for a, b in zip(places[::2], places[1::2], strict=True)]


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_tokens_are_the_text(source, cache, tokenizer):
    tokens, _ = made(source, cache, tokenizer=tokenizer)
    given = list(text_module.documents(source))
    found = list(text_module.split(given, 0.05).sides(given))
    assert decoded(tokens, tokens.train) == [document.text for out, document in found if not out]
    assert decoded(tokens, tokens.validation) == [document.text for out, document in found if out]
    assert tokens.train_documents + tokens.validation_documents == len(given)
    assert tokens.validation_bytes == sum(len(document.text.encode()) for out, document in found if out)
    assert tokens.train_bytes == sum(len(document.text.encode()) for out, document in found if not out)
    assert tokens.vocabulary == (300 if tokenizer is None else 257)
    assert tokens.end_of_text == (0 if tokenizer is None else 256)
    assert tokens.train.dtype == np.uint16
    assert tokens.train.max() < tokens.vocabulary
    assert isinstance(tokens.train, np.memmap)
    assert not tokens.train.flags.writeable


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_encode_and_decode_are_inverse_and_text_never_makes_end_of_text(source, cache, tokenizer):
    tokens, _ = made(source, cache, tokenizer=tokenizer)
    assert tokens.decode(tokens.encode(HARD)) == HARD
    assert tokens.end_of_text not in tokens.encode("a <|endoftext|> b")
    assert tokens.decode([tokens.end_of_text]) == "<|endoftext|>"
    assert tokens.encode("") == []


def test_bytes_are_bytes_in_the_library_too():
    tokenizer = load_tokenizer("bytes")
    library = tokenizers.Tokenizer.from_str(tokenizer.json)
    everything = "".join(map(chr, range(0x800))) + "漢🙂"
    assert (
        library.encode(everything).ids == list(everything.encode()) == tokenizer.encode_batch([everything])[0].tolist()
    )


def test_long_documents_are_tokenised_in_pieces_without_a_seam(source, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(tokens_module, "PIECE", 50)
    monkeypatch.setattr(tokens_module, "GROUP", 120)
    whole = "no line at all " * 40 + "".join(f"line {n} é\n" for n in range(200))
    (tmp_path / "long.txt").write_text(whole, encoding="utf-8")
    tokens, _ = made(source, cache, validation=str(tmp_path / "long.txt"))
    assert decoded(tokens, tokens.validation) == [whole]
    assert decoded(tokens, tokens.train) == [document.text for document in text_module.documents(source)]


def test_training_text_of_a_vocabulary_is_bounded(source, cache, monkeypatch):
    seen = []
    original = tokens_module.train_tokenizer
    monkeypatch.setattr(tokens_module, "TRAINING_BYTES", 2000)
    monkeypatch.setattr(
        tokens_module, "train_tokenizer", lambda texts, size: original([seen.append(t) or t for t in texts], size)
    )
    tokens, _ = made(source, cache)
    assert 0 < sum(map(len, seen)) < 5000
    assert not set(seen) & set(decoded(tokens, tokens.validation))


def test_a_vocabulary_that_does_not_fit_16_bits(source, cache, tmp_path):
    vocabulary = {character: n for n, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary |= {f"filler{n}": n for n in range(256, 70_000)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    (tmp_path / "folder").mkdir()
    library.save(str(tmp_path / "folder" / "tokenizer.json"))
    tokens, _ = made(source, cache, tokenizer=str(tmp_path / "folder"))
    assert (tokens.vocabulary, tokens.end_of_text, tokens.train.dtype) == (70_001, 70_000, np.uint32)
    assert len(decoded(tokens, tokens.train)) == tokens.train_documents


def test_a_validation_source_leaves_the_training_source_whole(source, cache, tmp_path):
    (tmp_path / "val.txt").write_text("held out")
    tokens, _ = made(source, cache, validation=str(tmp_path / "val.txt"))
    assert decoded(tokens, tokens.validation) == ["held out"]
    assert tokens.train_documents == 60


def test_sources_can_share_a_tokenizer(cache):
    together, _ = made("synthetic:0.05,synthetic:0.1", cache)
    alone, _ = made("synthetic:0.1", cache, tokenizer=str(together.tokenizer_file))
    assert alone.tokenizer_digest == together.tokenizer_digest
    assert alone.digest != together.digest
    assert alone.encode(HARD) == together.encode(HARD)
    assert len(alone.train) < len(together.train)


# ---- the cache


def test_second_time_reads_no_text(source, cache, monkeypatch):
    first, tokenised = made(source, cache)
    assert tokenised
    monkeypatch.setattr(text_module, "documents", lambda source: pytest.fail("the text was read"))
    second, _ = made(source, cache)
    assert second.digest == first.digest
    assert (second.train == first.train).all()


def test_cache_goes_by_content(source, cache, tmp_path):
    first, _ = made(source, cache)
    shutil.copy(source, tmp_path / "copy.txt")
    os.utime(source, (1, 1))
    for same in (source, str(tmp_path / "copy.txt")):
        tokens, tokenised = made(same, cache)
        assert not tokenised
        assert tokens.digest == first.digest
    (tmp_path / "copy.txt").write_text(Path(source).read_text("utf-8").replace("words", "WORDS"), encoding="utf-8")
    changed, tokenised = made(str(tmp_path / "copy.txt"), cache)
    assert tokenised
    assert changed.digest != first.digest


@pytest.mark.parametrize("other", [{"vocabulary": 301}, {"tokenizer": "bytes"}, {"fraction": 0.2}])
def test_other_options_make_another_set(source, cache, other):
    first, _ = made(source, cache)
    second, tokenised = made(source, cache, **other)
    assert tokenised
    assert second.digest != first.digest


def test_the_same_text_gives_the_same_digest_elsewhere(source, tmp_path):
    assert made(source, tmp_path / "here")[0].digest == made(source, tmp_path / "there")[0].digest


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def rewrite_about(file):
    saved = json.loads(file.read_text())
    saved["about"]["vocabulary"] += 1
    file.write_text(json.dumps(saved))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "train.bin", 100),
        lambda folder: flip(folder / "train.bin"),
        lambda folder: flip(folder / "validation.bin"),
        lambda folder: (folder / "validation.bin").write_bytes(b""),
        lambda folder: flip(folder / "tokenizer.json"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "set.json").unlink(),
        lambda folder: (folder / "set.json").write_text("{"),
        lambda folder: (folder / "set.json").write_text("[]"),
        lambda folder: (folder / "set.json").write_text('{"about": null, "checksum": ""}'),
        lambda folder: rewrite_about(folder / "set.json"),
        shutil.rmtree,
        lambda folder: [file.write_bytes(b"\xff/../x") for file in (folder.parents[1] / "known").iterdir()],
    ],
)
def test_a_damaged_set_is_made_again(source, cache, damage):
    first, _ = made(source, cache)
    before, digest = np.array(first.train), first.digest
    damage(first.tokenizer_file.parent)
    again, _ = made(source, cache)
    assert again.digest == digest
    assert (again.train == before).all()
    assert not made(source, cache)[1]
    assert not list((cache / "tokens").glob("*partial*"))


def test_checksums_of_large_files_are_spread_over_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "BLOCK", 10)
    monkeypatch.setattr(tokens_module, "BLOCKS", 4)
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))
    whole = tokens_module._checksum(file)
    for place, seen in ((0, True), (500, False), (999, True)):
        file.write_bytes(bytes(place) + b"x" + bytes(999 - place))
        assert (tokens_module._checksum(file) != whole) == seen
    for size in (1, 9, 10, 11, 39, 40):
        for place in range(size):
            file.write_bytes(bytes(size))
            whole = tokens_module._checksum(file)
            file.write_bytes(bytes(place) + b"x" + bytes(size - 1 - place))
            assert tokens_module._checksum(file) != whole


PREPARE = """
import sys
from pathlib import Path
from isles.train import tokens
{before}
said = []
found = tokens.prepare(sys.argv[1], vocabulary=300, cache=Path(sys.argv[2]), say=said.append)
print(found.digest, sum(line.startswith("tokenising") for line in said))
"""


def process(source, cache, before=""):
    command = [sys.executable, "-c", PREPARE.format(before=before), source, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_do_the_work_once(source, cache):
    started = [process(source, cache) for _ in range(3)]
    found = [child.communicate(timeout=120)[0].split() for child in started]
    assert [child.returncode for child in started] == [0, 0, 0]
    assert len({digest for digest, _ in found}) == 1
    assert sum(int(times) for _, times in found) == 1
    assert not list(cache.rglob("*partial*"))


def test_without_locks_the_first_one_stands(source, cache, monkeypatch):
    monkeypatch.setattr(tokens_module, "fcntl", None)
    barrier, sets = threading.Barrier(2), []
    original = tokens_module._tokenise

    def together(*arguments):
        barrier.wait(120)
        return original(*arguments)

    monkeypatch.setattr(tokens_module, "_tokenise", together)
    threads = [threading.Thread(target=lambda: sets.append(made(source, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [tokenised for _, tokenised in sets] == [True, True]
    assert sets[0][0].digest == sets[1][0].digest
    assert len(list((cache / "tokens").iterdir())) == 1


def test_a_killed_process_leaves_no_lock_and_no_half_set(source, cache):
    hang = "import time; tokens._tokenise = lambda *_: (print('busy', flush=True), time.sleep(100))"
    child = process(source, cache, hang)
    assert child.stdout.readline() == "busy\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    left = list((cache / "tokens").glob("*partial*"))
    assert len(left) == 1
    tokens, tokenised = made(source, cache)
    assert tokenised
    assert len(decoded(tokens, tokens.train)) == tokens.train_documents
    os.utime(left[0], (time.time() - 100_000,) * 2)  # two days later it is swept up
    made(source, cache, vocabulary=310)
    assert not left[0].exists()


@pytest.mark.parametrize("call", [0, 2])
def test_a_full_disk_leaves_nothing_behind(source, cache, monkeypatch, call):
    calls, fsync = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > call:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            made(source, cache)
    assert not list((cache / "tokens").iterdir())
    assert made(source, cache)[1]


def test_remote_sources_are_copied_once(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(
        text_module,
        "_hugging_face",
        lambda part: calls.append(part) or iter([text_module.Document(f"{n}", f"row {n} é\n" * 30) for n in range(50)]),
    )
    first, _ = made("hf:me/data", cache)
    assert made("hf:me/data", cache)[0].digest == first.digest
    assert first.train_documents + first.validation_documents == 50
    assert calls == ["hf:me/data"]


def test_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("ISLES_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "isles"


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 256}, r"vocabulary=256 must be from 257 \(256 bytes and end-of-text\)"),
        ({"vocabulary": 2**30}, "vocabulary=1073741824 must be from 257 .* to 16777216"),
        ({"fraction": 0.0}, r"fraction=0\.0 must be between 0 and 1"),
        ({"tokenizer": "missing.json"}, "tokenizer 'missing.json' not found"),
        ({"tokenizer": "{}/broken.json"}, "broken.json' is not a JSON file of the tokenizers library"),
        ({"tokenizer": "{}/endless.json"}, "endless.json has no end-of-text token: add one of"),
        ({"validation": "{}/missing.txt"}, "missing.txt' not found"),
        ({"validation": "{}/empty.txt"}, "empty.txt' holds no text"),
        ({"source": "{}/missing.txt"}, "missing.txt' not found"),
        ({"source": "{}/empty.txt"}, "empty.txt' holds no text"),
        ({"source": "{}/tiny.txt"}, "tiny.txt' is too small to hold out text for validation: give more"),
        ({"cache": "{}/tiny.txt"}, "cannot use .*tiny.txt as cache .*set ISLES_CACHE"),
    ],
)
def test_bad_input_is_one_clear_line(source, cache, tmp_path, options, message):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tiny.txt").write_text("x")
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "endless.json"))
    options = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message) as raised:
        made(options.pop("source", source), Path(options.pop("cache", cache)), **options)
    assert "\n" not in str(raised.value)
