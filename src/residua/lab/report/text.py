"""visible(text): what a reader can see of a text that somebody else wrote, and nothing that acts on the page around it.

Names, paths and tokens are hostile input. Characters that hide, reorder or move other text are written out as their
code points; the length is bounded. Markup needs no treatment here: the template and the script escape all text.
"""

from __future__ import annotations

import unicodedata

from residua.lab.data import Tokenizer

MOST = 100
"""Characters of a name that are shown."""
MOST_OF_A_TOKEN = 24

_SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5"}
_DOTTED_CIRCLE = "\u25cc"


def visible(text: object, most: int = MOST) -> str:
    """The text with a sign for every character that cannot be seen, cut where it is too long."""
    whole = str(text)
    shown = "".join(_seen(character) for character in whole[:most])
    if shown and unicodedata.category(shown[0]).startswith("M"):
        shown = _DOTTED_CIRCLE + shown
    return shown if len(whole) <= most else f"{shown}\u2026 ({len(whole):,} characters)"


def visible_token(tokenizer: Tokenizer, index: int) -> str:
    """A token as a reader tells it from its neighbours: blanks have signs, half characters their number."""
    special = {tokenizer.end: "<end>", tokenizer.mask: "<mask>"}.get(index)
    if special is not None:
        return special
    text = tokenizer.decode([index])
    return visible_piece(text) if text and "\ufffd" not in text else f"<{index}>"


def visible_piece(text: str) -> str:
    """The text of a token, with signs for its blanks."""
    return visible("".join(_SIGNS.get(character, character) for character in text), MOST_OF_A_TOKEN)


def visible_tree(value: object, most: int = 600) -> object:
    """The same for every text in plain values."""
    if isinstance(value, str):
        return visible(value, most)
    if isinstance(value, dict):
        return {visible(key): visible_tree(each, most) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [visible_tree(each, most) for each in value]
    return value


def _seen(character: str) -> str:
    kind = unicodedata.category(character)
    # C: control, format (bidirectional marks, zero width), surrogate, private, unassigned; Zl, Zp: line breaks
    hidden = kind.startswith("C") or kind in ("Zl", "Zp") or (kind == "Zs" and character != " ")
    # Variation selectors and fillers count as marks or letters, and are as invisible.
    hidden = hidden or character in "\u034f\u115f\u1160\u3164\uffa0" or "\ufe00" <= character <= "\ufe0f"
    return f"[U+{ord(character):04X}]" if hidden else character
