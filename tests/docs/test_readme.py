"""README is a first screen: short, with commands that install, and links that lead somewhere."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_short_and_says_how_to_install():
    assert len(README.splitlines()) <= 150
    for command in ("pip install residua", "pip install 'residua[hf]'", "make demo", "make test"):
        assert f"\n{command} " in README


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_counts_the_types_that_convert_as_their_file_does():
    types = json.loads((ROOT / "results" / "types.json").read_text())["types"]
    converts = sum("designs" in each for each in types.values())
    assert f"({converts} of {len(types)} types)" in README
