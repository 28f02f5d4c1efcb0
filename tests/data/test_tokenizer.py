"""Tokenizers: exact round trips, specials that no text can spell, folders of every make, errors that name the cure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from residua.lab.data.source import DataError
from residua.lab.data.tokenizer import Bytes, choose, load_tokenizer, read_folder, train_bpe
from tests.data.text import document

TEXTS = [document(seed) for seed in range(40)]
BPE = train_bpe("bpe:400", TEXTS, "made up")
AWKWARD = [
    "",
    " ",
    "\n\n  x\t",
    "na\u00efve \u03a9\u03bc\u03ad\u03b3\u03b1 \u65e5\u672c \U0001f642",
    "<|endoftext|></s>[MASK]<mask>",
    "a\u0301 \x7f \r\n",
    "  lead",
]


def byte_level(folder, specials=(), config=None, size=300):
    """A folder as `save_pretrained` writes it."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return written(folder, library, config)


def word_piece(folder):
    """As BERT: lower case, unknown words, [SEP] and [MASK], and a template that wraps every text."""
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    )
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return written(folder, library)


def word_level(folder, size):
    """A word an id, and white space lost."""
    library = Library(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return written(folder, library)


def written(folder, library, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=["bytes", "bpe"])
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(AWKWARD))
def test_tokenizer_round_trip_is_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.end, *ids, tokenizer.mask]) == text
    assert all(0 <= index < tokenizer.end < tokenizer.mask for index in ids)


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=["bytes", "bpe"])
def test_tokenizer_encodes_many_as_it_encodes_one(tokenizer):
    texts = [*AWKWARD, *TEXTS]
    assert [ids.tolist() for ids in tokenizer.encode_all(texts)] == [tokenizer.encode(text) for text in texts]


def test_tokenizer_bytes_are_the_utf8_bytes():
    assert Bytes().encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert Bytes().decode([97, 0xC3]) == "a\ufffd"
    assert (Bytes().vocab, Bytes().end, Bytes().mask) == (258, 256, 257)


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_tokenizer_refuses_ids_it_does_not_have(tokenizer, wrong):
    with pytest.raises(ValueError, match=rf"{tokenizer.name} has ids 0 to {tokenizer.vocab - 1}, not {wrong}"):
        tokenizer.decode([5, wrong])


@pytest.mark.parametrize("size", [259, 300, 450])
def test_tokenizer_bpe_has_exactly_the_size_asked_for(size):
    tokenizer = train_bpe(f"bpe:{size}", TEXTS, "made up")
    assert (tokenizer.vocab, tokenizer.end, tokenizer.mask) == (size, size - 2, size - 1)
    assert max(max(tokenizer.encode(text)) for text in TEXTS) < size - 2


def test_tokenizer_bpe_learns_from_the_text():
    text = "".join(TEXTS)
    assert len(BPE.encode(text)) < 0.6 * len(text.encode())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte", "unknown tokenizer 'byte': choose from bytes, bpe:VOCAB, hf:DIR"),
        ("", "unknown tokenizer '': choose from"),
        ("hf:", "unknown tokenizer 'hf:': choose from"),
        ("bpe", "unknown tokenizer 'bpe': choose from"),
        ("bpe:", "write bpe:VOCAB with a whole number"),
        ("bpe:4k", "write bpe:VOCAB with a whole number"),
        ("bpe:-5", "write bpe:VOCAB with a whole number"),
        ("bpe:258", "VOCAB is from 259 "),
        ("bpe:0", "VOCAB is from 259 "),
        ("bpe:99999999999", "to 1048576"),
        ("hf:/no/such/folder", "is not a directory with a tokenizer.json"),
    ],
)
def test_tokenizer_wrong_name_is_refused_before_any_work(name, message):
    with pytest.raises(DataError) as caught:
        choose(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_bpe_larger_than_the_text_supports_says_the_most():
    with pytest.raises(DataError, match=r"the train split of tiny supports (\d+) ids at most; choose bpe:\1") as caught:
        train_bpe("bpe:5000", TEXTS[:3], "tiny")
    most = str(caught.value).rpartition("bpe:")[2].split()[0]
    assert train_bpe(f"bpe:{most}", TEXTS[:3], "tiny").vocab == int(most)
    with pytest.raises(DataError, match="supports 258 ids at most; use bytes, or more text"):
        train_bpe("bpe:259", ["abc"], "tiny")


@pytest.mark.parametrize(
    ("specials", "config", "end", "mask", "vocab"),
    [
        ((), None, 300, 301, 302),
        (("<|endoftext|>",), None, 0, 300, 301),
        (("<mask>",), None, 300, 0, 301),
        (("[MASK]", "</s>"), None, 1, 0, 300),
        (("<|endoftext|>", "<|im_end|>"), {"eos_token": "<|im_end|>"}, 1, 300, 301),
        (("<|endoftext|>", "STOP"), {"eos_token": {"content": "STOP"}, "mask_token": None}, 1, 300, 301),
        (("<|endoftext|>",), {"eos_token": "absent"}, 0, 300, 301),
    ],
)
def test_tokenizer_folder_reuses_its_own_specials(tmp_path, specials, config, end, mask, vocab):
    tokenizer = read_folder(f"hf:{byte_level(tmp_path / 'tok', specials, config)}")
    assert (tokenizer.end, tokenizer.mask, tokenizer.vocab) == (end, mask, vocab)
    for text in (*AWKWARD, *specials):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, end]) == text
        assert not {end, mask} & set(ids)


def test_tokenizer_folder_gives_the_ids_of_its_json(tmp_path):
    folder = byte_level(tmp_path / "tok", ("<|endoftext|>",))
    library = Library.from_file(str(folder / "tokenizer.json"))
    tokenizer = read_folder(f"hf:{folder}")
    assert all(tokenizer.encode(text) == library.encode(text).ids for text in TEXTS)


def test_tokenizer_folder_of_word_pieces_is_read_without_its_template(tmp_path):
    folder = word_piece(tmp_path / "tok")
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = read_folder(f"hf:{folder}")
    assert (tokenizer.end, tokenizer.mask, tokenizer.vocab) == (3, 4, 200)
    ids = tokenizer.encode(TEXTS[0] + " [SEP]")
    assert len(ids) > 64
    assert not {0, 2, 3, 4} & set(ids)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json in"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": '{"model": 1}'}, "tokenizer.json cannot be read"),
    ],
)
def test_tokenizer_folder_that_is_wrong_is_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        choose(f"hf:{tmp_path}")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_dump_gives_it_back(tmp_path):
    folder = byte_level(tmp_path / "tok", ("<|endoftext|>",))
    for tokenizer in (Bytes(), BPE, read_folder(f"hf:{folder}")):
        again = load_tokenizer(tokenizer.dump())
        assert (again.name, again.vocab, again.end, again.mask, again.hash) == (
            tokenizer.name, tokenizer.vocab, tokenizer.end, tokenizer.mask, tokenizer.hash,
        )  # fmt: skip
        assert all(again.encode(text) == tokenizer.encode(text) for text in AWKWARD + TEXTS)


def test_tokenizer_hash_is_of_what_it_does_not_of_where_it_lies(tmp_path):
    first, second = (byte_level(tmp_path / name, ("<|endoftext|>",)) for name in "ab")
    other = byte_level(tmp_path / "c", ("<|endoftext|>",), size=301)
    assert read_folder(f"hf:{first}").hash == read_folder(f"hf:{second}").hash != read_folder(f"hf:{other}").hash
