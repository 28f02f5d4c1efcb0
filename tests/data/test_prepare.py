"""`prepare`: ids that give the text back, one fingerprint for one content, a cache that survives damage and company."""

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from residua.lab.data import DataError, Tokens, load_tokenizer, prepare
from tests.data.test_tokenizer import byte_level, word_level, word_piece
from tests.data.text import document, fill

TOKENIZERS = ("bytes", "bpe:300", "hf")


@pytest.fixture
def make(tmp_path):
    """`prepare` on a folder of 40 made-up documents with a cache of its own."""
    fill(tmp_path / "text")

    def call(corpus=f"dir:{tmp_path / 'text'}", tokenizer="bytes", **options):
        if tokenizer == "hf":
            tokenizer = f"hf:{byte_level(tmp_path / 'tok', ('<|endoftext|>',))}"
        return prepare(corpus, tokenizer, **{"cache": tmp_path / "cache"} | options)

    return call


def documents(tokens, side):
    """The texts of a side, cut at `end`."""
    ids = getattr(tokens, side)
    pieces = np.split(ids, np.flatnonzero(ids == tokens.end) + 1)
    assert len(pieces[-1]) == 0, "the last document is not closed"
    return [tokens.decode(piece.tolist()) for piece in pieces[:-1]]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prepare_gives_every_document_back_once(make, tokenizer):
    tokens = make(tokenizer=tokenizer)
    train, valid = documents(tokens, "train"), documents(tokens, "valid")
    assert sorted(train + valid) == sorted(document(number) for number in range(40))
    assert len(valid) == 2
    assert tokens.train_bytes == sum(len(text.encode()) for text in train)
    assert tokens.valid_bytes == sum(len(text.encode()) for text in valid)
    assert tokens.train.dtype == tokens.valid.dtype == np.uint16
    assert max(tokens.train.max(), tokens.valid.max()) < tokens.vocab
    assert tokens.mask not in tokens.train
    assert isinstance(tokens.train, np.memmap)
    assert not tokens.train.flags.writeable
    assert tokens.decode(tokens.encode("a text")) == "a text"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prepare_again_is_the_same_from_the_cache_or_anew(make, tmp_path, tokenizer):
    said = []
    first, second = (make(tokenizer=tokenizer, progress=said.append) for _ in range(2))
    anew = make(tokenizer=tokenizer, cache=tmp_path / "other")
    assert sum("encoding" in line for line in said) == 2
    assert sum("reading" in line for line in said) == 1
    for other in (second, anew):
        assert json.dumps(other.manifest) == json.dumps(first.manifest)
        assert np.array_equal(other.train, first.train)
        assert np.array_equal(other.valid, first.valid)
    assert [path.name for path in files(tmp_path / "cache")] == [path.name for path in files(tmp_path / "other")]
    digests = [[hashlib.sha256(p.read_bytes()).digest() for p in files(tmp_path / name)] for name in ("cache", "other")]
    assert digests[0] == digests[1]


def test_prepare_manifest_says_everything(make, tmp_path):
    (tmp_path / "text" / "copy.txt").write_text(document(0))
    (tmp_path / "text" / "blank.txt").write_text(" \n")
    (tmp_path / "text" / "latin.txt").write_bytes(b"na\xefve")
    said = []
    tokens = make(tokenizer="bpe:300", progress=said.append)
    manifest = json.loads(json.dumps(tokens.manifest))
    assert manifest["corpus"] == f"dir:{tmp_path / 'text'}"
    assert manifest["licence"] == "not stated: the text is the user's own files"
    assert manifest["documents"] == {"train": 38, "valid": 2}
    assert manifest["bytes"] == {"train": tokens.train_bytes, "valid": tokens.valid_bytes}
    assert manifest["tokens"] == {"train": len(tokens.train), "valid": len(tokens.valid)}
    assert manifest["reading"] == {
        "read": 43, "blank": 1, "undecodable": 1, "first_undecodable": "latin.txt", "duplicates": 1,
        "near_duplicate_groups": 0,
    }  # fmt: skip
    assert manifest["tokenizer"] == {
        "name": "bpe:300", "hash": tokens.tokenizer.hash, "vocab": 300, "end": 298, "mask": 299, "exact": True,
    }  # fmt: skip
    assert manifest["versions"].keys() == {"python", "residua", "tokenizers", "numpy"}
    assert len(manifest["fingerprint"]) == len(manifest["content"]) == 64
    assert any(manifest["source"] in line and manifest["licence"] in line for line in said)
    assert any("1 documents are not UTF-8 text" in line and "latin.txt" in line for line in said)


def test_prepare_without_progress_warns_only_of_trouble(make, tmp_path):
    make()  # warnings are errors here
    (tmp_path / "text" / "latin.txt").write_bytes(b"na\xefve")
    with pytest.warns(UserWarning, match="1 documents are not UTF-8 text and are left out, the first is latin.txt"):
        make()


def test_prepare_keeps_near_duplicates_on_one_side(tmp_path):
    """20 texts in six versions each, so that a split by document would tear most of them apart."""
    for number in range(20):
        words = document(number, 150).split()
        for version in range(6):
            words[version * 20] = f"changed{version}"
            path = tmp_path / "text" / f"{version}-{number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text((" " if version % 2 else "\n  ").join(words))
    tokens = prepare(f"dir:{tmp_path / 'text'}", cache=tmp_path / "cache")
    sides = [{text.split()[-1] for text in documents(tokens, side)} for side in ("train", "valid")]
    assert tokens.manifest["reading"]["near_duplicate_groups"] == 20
    assert tokens.manifest["documents"] == {"train": 114, "valid": 6}
    assert not sides[0] & sides[1]


def edit(folder):
    (folder / "text" / "003.txt").write_text(document(3).replace("e", "E", 1))


def add(folder):
    (folder / "text" / "new.txt").write_text(document(77))


def move(folder):
    (folder / "text").rename(folder / "moved")
    (folder / "text").symlink_to(folder / "moved")


def duplicate(folder):
    (folder / "text" / "zz.txt").write_text(document(3))


@pytest.mark.parametrize(("change", "same"), [(edit, False), (add, False), (move, True), (duplicate, True)])
def test_prepare_fingerprint_follows_the_content(make, tmp_path, change, same):
    before = make().manifest
    change(tmp_path)
    after = make().manifest
    assert (after["fingerprint"] == before["fingerprint"]) == same
    assert (after["content"] == before["content"]) == same


def test_prepare_fingerprint_follows_the_tokenizer(make):
    found = {make(tokenizer=name).manifest["fingerprint"] for name in ("bytes", "bpe:300", "bpe:301", "hf")}
    assert len(found) == 4


def test_prepare_fingerprint_does_not_depend_on_the_name(make, tmp_path):
    assert make().manifest["fingerprint"] == make(f"file:{tmp_path}/text/*.txt").manifest["fingerprint"]


@pytest.mark.parametrize("kind", ["corpora", "tokenizers", "tokens"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_prepare_damaged_cache_is_named_and_made_again(make, tmp_path, kind, damage):
    before = make(tokenizer="bpe:300")
    expected = {path: path.read_bytes() for path in files(tmp_path / "cache")}
    (path,) = (path for path in expected if path.parent.name == kind)
    data = bytearray(expected[path])
    data[len(data) // 2] ^= 1
    path.unlink()  # a new file, not new bytes in the old one, which `before` has mapped
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[: len(data) // 2]), "empty": b""}[damage])
    with pytest.warns(UserWarning, match="is corrupted") as caught:
        after = make(tokenizer="bpe:300")
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert {path: path.read_bytes() for path in files(tmp_path / "cache")} == expected
    assert np.array_equal(after.train, before.train)
    assert after.manifest == before.manifest


PREPARE = """
import sys, hashlib, time
from pathlib import Path
from residua.lab.data import prepare
print("ready", flush=True)
sys.stdin.readline()
tokens = prepare(sys.argv[1], "bpe:400", cache=Path(sys.argv[2]), progress=lambda line: None)
print(tokens.manifest["fingerprint"], hashlib.sha256(tokens.train.tobytes() + tokens.valid.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_prepare_by_two_processes_at_once(tmp_path):
    """Both start at the same moment from a cache that lacks the tokenizer and has a damaged corpus.

    Each byte they leave is what a third process made alone: training and encoding are deterministic.
    """
    corpus = f"dir:{fill(tmp_path / 'text', count=300, words=200)}"
    alone = prepare(corpus, "bpe:400", cache=tmp_path / "alone")
    expected = hashlib.sha256(alone.train.tobytes() + alone.valid.tobytes()).hexdigest()
    shutil.copytree(tmp_path / "alone", tmp_path / "cache")
    (corpora,) = files(tmp_path / "cache" / "corpora")
    corpora.write_bytes(corpora.read_bytes()[:-1])
    for kind in ("tokens", "tokenizers"):
        shutil.rmtree(tmp_path / "cache" / kind)
    command = [sys.executable, "-c", PREPARE, corpus, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 2
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert out.split() == [alone.manifest["fingerprint"], expected]
    made = {path.relative_to(tmp_path / "cache"): path.read_bytes() for path in files(tmp_path / "cache")}
    assert made == {path.relative_to(tmp_path / "alone"): path.read_bytes() for path in files(tmp_path / "alone")}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([b" ", b"\n\n"], "is empty: of 2 documents 2 are blank"),
        ([b"\xff\xfe", b"\0"], "is empty: of 2 documents 0 are blank, 2 are not UTF-8 text"),
        ([b"one document"], "is too small to split: it is one document; give two or more files that differ"),
        ([b"one document", b"one  document"], "is too small to split: its 2 documents are near-duplicates"),
    ],
)
def test_prepare_corpus_that_cannot_be_split_is_refused(tmp_path, texts, message):
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / str(number)).write_bytes(text)
    with pytest.raises(DataError) as caught:
        prepare(f"dir:{tmp_path / 'text'}", cache=tmp_path / "cache")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_prepare_wrong_tokenizer_is_refused_before_the_corpus_is_read(make, tmp_path):
    with pytest.raises(DataError, match="unknown tokenizer 'word'"):
        make(tokenizer="word")
    assert not (tmp_path / "cache").exists()


def test_prepare_too_large_bpe_names_the_corpus_and_keeps_nothing_of_it(make, tmp_path):
    with pytest.raises(DataError, match=r"bpe:9000: the train split of dir:.* supports \d+ ids at most"):
        make(tokenizer="bpe:9000")
    assert not (tmp_path / "cache" / "tokenizers").exists()
    assert not (tmp_path / "cache" / "tokens").exists()


def test_prepare_lossy_tokenizer_is_said(make, tmp_path):
    (tmp_path / "text" / "100.txt").write_text(document(1).upper())
    folder = word_piece(tmp_path / "pieces")
    for _ in range(2):  # made, then from the cache
        said = []
        tokens = make(tokenizer=f"hf:{folder}", progress=said.append)
        assert not tokens.manifest["tokenizer"]["exact"]
        assert any("does not give every text back" in line for line in said)


@pytest.mark.parametrize(("words", "dtype"), [(65534, np.uint16), (65535, np.uint32)])
def test_prepare_ids_take_as_many_bytes_as_the_vocabulary_needs(make, tmp_path, words, dtype):
    folder = word_level(tmp_path / "words", words)
    with pytest.warns(UserWarning, match="does not give every text back"):
        tokens = make(tokenizer=f"hf:{folder}")
    assert (tokens.vocab, tokens.end, tokens.mask) == (words + 2, words, words + 1)
    assert tokens.train.dtype == dtype
    assert (tokens.train == words).sum() == tokens.manifest["documents"]["train"]


def test_prepare_text_that_encodes_to_the_end_is_refused(make, tmp_path):
    """A vocabulary in which the end token is an ordinary word."""
    folder = word_level(tmp_path / "words", 10)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    (tmp_path / "text" / "999.txt").write_text("w3 " * 50)
    with pytest.raises(DataError, match="encodes plain text to its end or mask token; use another one"):
        make(tokenizer=f"hf:{folder}")


@pytest.mark.eval  # lm-eval brings the datasets package
def test_prepare_streams_a_dataset_once(tmp_path, monkeypatch):
    rows = [{"text": document(number)} for number in range(30)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = prepare(f"hf:{tmp_path / 'set'}", cache=tmp_path / "cache")
    assert sorted(documents(first, "train") + documents(first, "valid")) == sorted(row["text"] for row in rows)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare(f"hf:{tmp_path / 'set'}", cache=tmp_path / "cache").manifest == first.manifest
    with pytest.raises(DataError, match="needs the datasets package"):
        prepare(f"hf:{tmp_path / 'set'}", cache=tmp_path / "other")


def test_prepare_uses_the_cache_folder_of_the_environment(make, tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "named"))
    make(cache=None)
    assert {path.parent.name for path in files(tmp_path / "named")} == {"corpora", "tokens"}


@pytest.mark.slow
def test_prepare_pydoc_for_real(tmp_path):
    said = []
    tokens = prepare(cache=tmp_path, progress=said.append)
    assert isinstance(tokens, Tokens)
    manifest = tokens.manifest
    assert manifest["corpus"] == "pydoc"
    assert "PSF" in manifest["licence"]
    assert manifest["documents"]["train"] > 4000
    assert tokens.train_bytes > 1_500_000
    assert 0.04 < tokens.valid_bytes / (tokens.train_bytes + tokens.valid_bytes) < 0.06
    assert len(tokens.train) == tokens.train_bytes + manifest["documents"]["train"]
    texts = documents(tokens, "train")
    assert any(text.startswith('The "assert" statement') or '"assert" statement' in text for text in texts)
    assert load_tokenizer(tokens.tokenizer.dump()).vocab == 258
    larger = prepare("pydoc", "bpe:2048", cache=tmp_path, progress=said.append)
    assert sum(line.startswith("reading") for line in said) == 1
    assert larger.valid_bytes == tokens.valid_bytes
    assert 2.5 < larger.valid_bytes / len(larger.valid) < 5
    assert documents(larger, "valid") == documents(tokens, "valid")
