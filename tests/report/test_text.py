"""Text of others: seen, bounded, and without power over what stands beside it."""

import pytest

from residua.lab.data import load_tokenizer
from residua.lab.report.text import MOST, visible, visible_piece, visible_token, visible_tree

HIDDEN = [
    "\u202e", "\u2066", "\u200b", "\u200d", "\ufeff", "\u00ad", "\u2028", "\x00", "\x1b", "\x7f", "\u00a0", "\u3164",
    "\ufe0f", "\U000e0041",
]  # fmt: skip


@pytest.mark.parametrize("character", HIDDEN, ids=lambda character: f"U+{ord(character):04X}")
def test_hidden_characters_are_written_out(character):
    assert visible(f"a{character}b") == f"a[U+{ord(character):04X}]b"


@pytest.mark.parametrize("text", ["delta:blocks=4", "<b>&\"'", "\u05d0\u05d1", "\u6f22\u5b57", "e\u0301", ""])
def test_plain_text_stays(text):
    assert visible(text) == text


def test_mark_without_a_letter_gets_one():
    assert visible("\u0301x") == "\u25cc\u0301x"


def test_long_names_are_cut_and_say_so():
    shown = visible("n" * 10_000)
    assert shown.startswith("n" * MOST + "\u2026")
    assert "10,000 characters" in shown
    assert len(shown) < MOST + 30
    assert visible(shown, 200) == shown, "what was made visible stays as it is"


def test_tokens_are_told_apart():
    tokenizer = load_tokenizer('{"name": "bytes"}')
    shown = [visible_token(tokenizer, index) for index in (97, 32, 10, 9, 0xE2, 256, 257, 0, 60)]
    assert shown == ["a", "\u00b7", "\u21b5", "\u21e5", "<226>", "<end>", "<mask>", "[U+0000]", "<"]
    assert visible_piece(" the") == "\u00b7the"


def test_trees_are_made_visible_to_the_keys():
    assert visible_tree({"\u202ek": ["\u200b", 1, None, {"x": "y"}]}) == {
        "[U+202E]k": ["[U+200B]", 1, None, {"x": "y"}]
    }
