"""Corpora: what is read, in which order, what is left out and counted, and one clear line for what cannot be."""

import json
import os
import platform
import sys

import pytest

from residua.lab.data import hub, stdlib
from residua.lab.data.source import DataError, Tally, source
from tests.data.text import document

DOCUMENTED = '''"""%s"""
raise SystemExit("imported")
class A:
    """short"""
    def f(self):
        """    A docstring of the method f, long enough to count.

            Indented more.
        The end.
        """
    async def g(self):
        "An asynchronous one, also of more than forty characters."
x = """A string that is not a docstring and has more than forty characters."""
'''


def read(found):
    tally = Tally()
    return list(found.documents(tally)), tally


def library(root):
    """A standard library in small: none of it can be imported."""
    files = {
        "abc.py": DOCUMENTED % "The module abc, documented in more than forty characters.",
        "email/mime.py": '"""Mime, documented at some length, more than forty characters."""\n',
        "broken.py": "def (:\n",
        "latin.py": b"# -*- coding: latin-1 -*-\n'''Documented na\xefvely, in more than forty characters.'''\n",
        "_sysconfigdata__linux.py": '"""Written by the build, in more than forty characters, here."""\n',
        "config-3.11/python-config.py": '"""Written by the build, in more than forty characters, too."""\n',
        "data.txt": "no source",
        "pydoc_data/topics.py": "# made\ntopics = {'b': 'Topic B', 'a': 'Topic A'}\n",
    }
    for folder in ("test", "tkinter/test", "unittest/tests", "idlelib", "lib2to3", "site-packages", "__pycache__"):
        files[f"{folder}/left_out.py"] = f'"""{folder} has documentation of more than forty characters."""\n'
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    root = library(tmp_path / "lib")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    return root


def test_source_pydoc_reads_topics_and_docstrings_without_importing(small_library):
    documents, tally = read(source("pydoc"))
    assert documents == [
        b"Topic B",
        b"Topic A",
        b"The module abc, documented in more than forty characters.",
        b"A docstring of the method f, long enough to count.\n\n    Indented more.\nThe end.",
        b"An asynchronous one, also of more than forty characters.",
        b"Mime, documented at some length, more than forty characters.",
        "Documented na\xefvely, in more than forty characters.".encode(),
    ]
    assert tally.undecodable == ["broken.py"]


def test_source_pycode_reads_the_sources(small_library):
    documents, tally = read(source("pycode"))
    names = ["abc.py", "broken.py", "email/mime.py", "pydoc_data/topics.py"]
    assert documents == [(small_library / name).read_bytes() for name in names]
    assert tally.undecodable == ["latin.py"]


@pytest.mark.parametrize("name", ["pydoc", "pycode"])
def test_source_of_python_states_its_version_and_licence(name):
    found = source(name)
    assert platform.python_version() in found.origin
    assert "PSF-2.0" in found.licence
    assert found.python


def test_source_key_follows_the_bytes_and_names(small_library):
    keys = [source("pydoc").key(), source("pydoc").key(), source("pycode").key()]
    assert keys[0] == keys[1] != keys[2]
    changed = small_library / "abc.py"
    before = changed.stat()
    changed.write_bytes(changed.read_bytes().replace(b"class A", b"class B"))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.append(source("pydoc").key())
    changed.rename(small_library / "abd.py")
    keys.append(source("pydoc").key())
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("remove", "corpus", "message"),
    [
        (
            "pydoc_data/topics.py",
            "pydoc",
            "this Python has no pydoc_data/topics.py; use another one, or the corpus pycode",
        ),
        (None, "pycode", "no standard library sources in"),
    ],
)
def test_source_incomplete_library_is_refused(small_library, remove, corpus, message):
    for path in [small_library / remove] if remove else list(small_library.rglob("*.py")):
        path.unlink()
    with pytest.raises(DataError, match=message):
        read(source(corpus))


def test_source_directory_reads_files_below_by_name_and_counts_what_is_not_text(tmp_path):
    for name, data in {
        "b.txt": b"bee", "a/z.md": b"zed", "a/c.txt": "\u00e9".encode(), ".git/config": b"hidden", ".hidden": b"hidden",
        "latin.txt": b"na\xefve", "image.png": b"\x89PNG\0", "empty": b"",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    documents, tally = read(source(f"dir:{tmp_path}"))
    assert documents == ["\u00e9".encode(), b"zed", b"bee", b""]
    assert tally.undecodable == ["image.png", "latin.txt"]


def test_source_pattern_matches_and_crosses_folders(tmp_path):
    for name in ("a.txt", "b.md", "in/c.txt", "in/deep/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    assert read(source(f"file:{tmp_path}/*.txt"))[0] == [b"a.txt"]
    assert read(source(f"file:{tmp_path}/**/*.txt"))[0] == [b"a.txt", b"in/c.txt", b"in/deep/d.txt"]


def test_source_directory_key_does_not_depend_on_where_it_lies(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for number in range(3):
            (tmp_path / place / f"{number}.txt").write_text(document(number))
    assert source(f"dir:{tmp_path}/one").key() == source(f"dir:{tmp_path}/two").key()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pydocs",
            "unknown corpus 'pydocs': did you mean pydoc? choose from pydoc, pycode, pysite, dir:PATH, file:GLOB, "
            "hf:NAME",
        ),
        ("wikipedia", "unknown corpus 'wikipedia': choose from pydoc"),
        ("", "unknown corpus '': choose from pydoc"),
        ("dirs:x", "unknown corpus 'dirs:x': did you mean dir:PATH?"),
        ("pydoc:x", "corpus 'pydoc:x': write it as pydoc"),
        ("pydoc:", "corpus 'pydoc:': write it as pydoc"),
        ("dir", "corpus 'dir': write it as dir:PATH"),
        ("dir:", "corpus 'dir:': write it as dir:PATH"),
        ("file:", "corpus 'file:': write it as file:GLOB"),
        ("hf", "corpus 'hf': write it as hf:NAME"),
        ("dir:{tmp}/none", "is no folder; give one that exists"),
        ("dir:{tmp}/a.txt", "is a file; write file:"),
        ("dir:{tmp}/bare", "no files below"),
        ("file:{tmp}/*.rst", "no file matches"),
        ("hf:name:subset=x", "'subset=x' is not key=value with a key among config, split"),
        ("hf:name:config", "'config' is not key=value"),
        ("hf:name:megabytes=0", "with N a whole number from 1"),
        ("hf:name:megabytes=many", "with N a whole number from 1"),
        ("hf::split=train", "write hf:NAME"),
    ],
)
def test_source_wrong_name_is_one_clear_line(tmp_path, name, message):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError) as caught:
        source(name.format(tmp=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_source_hub_without_the_package_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # what the import system does for a package that is not there
    with pytest.raises(DataError) as caught:
        read(source("hf:owner/name"))
    assert str(caught.value) == (
        "hf:owner/name needs the datasets package: pip install 'residua[data]', or use dir:PATH"
    )


def test_source_hub_takes_rows_until_the_limit():
    rows = [{"text": "a" * 10}, {"text": None}, {"text": "\ud800"}, {"text": "b" * 10}, {"text": "never"}]
    tally = Tally()
    assert list(hub.take("hf:x", rows, "text", 20, tally)) == [b"a" * 10, b"b" * 10]
    assert tally.undecodable == ["row 2"]
    with pytest.raises(DataError, match=r"hf:x has no text in column 'body'; add column=..., one of: text$"):
        list(hub.take("hf:x", [{"text": "a", "n": 3}], "body", 20, tally))


def test_source_hub_key_is_of_name_and_options():
    names = ["hf:a", "hf:b", "hf:a:split=test", "hf:a:megabytes=1"]
    assert len({source(name).key() for name in names}) == 4
    assert source("hf:a").key() == source("hf:a:split=train").key()


@pytest.fixture
def local_dataset(tmp_path):
    """A real dataset folder: rows as JSON lines, which `datasets` streams without a network."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"text": document(number), "body": f"body {number}", "n": number} for number in range(30)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder, rows


@pytest.mark.eval  # lm-eval brings the datasets package
def test_source_hub_streams_a_dataset(local_dataset):
    folder, rows = local_dataset
    assert read(source(f"hf:{folder}"))[0] == [row["text"].encode() for row in rows]
    assert read(source(f"hf:{folder}:column=body"))[0] == [row["body"].encode() for row in rows]


@pytest.mark.eval
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("split=none", "could not be streamed (ValueError: Bad split: none"),
        ("config=none", "could not be streamed (ValueError: BuilderConfig 'none' not found"),
        ("column=n", "has no text in column 'n'; add column=..., one of: text, body"),
    ],
)
def test_source_hub_wrong_option_is_one_clear_line(local_dataset, options, message):
    with pytest.raises(DataError) as caught:
        read(source(f"hf:{local_dataset[0]}:{options}"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.eval
def test_source_hub_without_a_network_is_one_clear_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        read(source("hf:owner/name"))
    assert "hf:owner/name could not be streamed (ConnectionError: " in str(caught.value)
    assert str(caught.value).endswith("check its name and the network, or use dir:PATH")
    assert "\n" not in str(caught.value)
