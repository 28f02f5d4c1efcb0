"""The corpus of installed packages: what is in it depends on the packages' versions and on nothing else."""

import shutil
from importlib import metadata

import pytest

from residua.lab.data import DataError, pysite
from residua.lab.data.source import Tally, source

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{licence}\n"
FILES = {
    "{name}/__init__.py": "import this\n",
    "{name}/inner/code.py": "x = 1\n",
    "{name}/version.py": "built = 'here'\n",
    "{name}/tests/test_code.py": "assert True\n",
    "{name}/data.txt": "no code\n",
    "../../bin/{name}.py": "a script\n",
}


def install(site, name, version="1.0", licence="License-Expression: MIT"):
    """A package as pip leaves it, below `site`."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version, licence=licence))
    written = {path.format(name=name): text for path, text in FILES.items()}
    for path, text in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text + f"# {name}\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in written))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two packages in a folder that stands for the environment; a function that looks there, or elsewhere."""
    monkeypatch.setattr(pysite, "PACKAGES", ("beta", "alpha"))
    install(tmp_path / "one", "alpha")
    install(tmp_path / "one", "beta", "2.0+cpu", "Classifier: License :: OSI Approved :: BSD License")

    def look(site="one"):
        def distribution(name):
            found = list(metadata.distributions(name=name, path=[str(tmp_path / site)]))
            if not found:
                raise metadata.PackageNotFoundError(name)
            return found[0]

        monkeypatch.setattr(pysite.metadata, "distribution", distribution)
        return source("pysite")

    return look


def test_sources_are_the_packages_own_files_in_the_order_of_their_names(machine):
    tally = Tally()
    assert list(machine().documents(tally)) == [
        b"import this\n# alpha\n", b"x = 1\n# alpha\n", b"import this\n# beta\n", b"x = 1\n# beta\n",
    ]  # fmt: skip
    assert not tally.undecodable


def test_versions_and_licences_are_said(machine):
    found = machine()
    assert found.origin == "Python sources of beta 2.0, alpha 1.0"
    assert found.licence == "beta 2.0: BSD License; alpha 1.0: MIT"
    assert found.at_hand


def test_text_depends_on_versions_and_not_on_the_machine(machine, tmp_path):
    """Another folder, another build of the same release: one key. Another release: another key."""
    key = machine().key()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two/beta/version.py").write_text("built = 'there'\n")
    info = tmp_path / "two/beta-2.0+cpu.dist-info"
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("2.0+cpu", "2.0+cu130"))
    assert machine("two").key() == key
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("2.0+cu130", "2.1"))
    assert machine("two").key() != key


def test_text_that_was_edited_in_place_is_other_text(machine, tmp_path):
    key = machine().key()
    (tmp_path / "one/beta/inner/code.py").write_text("x = 2\n")
    assert machine().key() != key


def test_package_that_is_not_there_is_named(machine, tmp_path):
    shutil.rmtree(tmp_path / "one/alpha-1.0.dist-info")
    with pytest.raises(DataError, match=r"sources of alpha, which is not installed.*constraints.txt"):
        machine()


def test_package_without_a_list_of_files_is_named(machine, tmp_path):
    (tmp_path / "one/alpha-1.0.dist-info/RECORD").write_text("")
    with pytest.raises(DataError, match="alpha is installed without a list of its Python files"):
        machine()


def test_every_package_is_pinned(request):
    """By constraints.txt, so that everybody who installs with it has this text."""
    pinned = {line.partition("==")[0] for line in (request.config.rootpath / "constraints.txt").read_text().split()}
    assert set(pysite.PACKAGES) <= pinned
