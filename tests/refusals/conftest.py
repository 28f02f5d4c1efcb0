"""The folder that refused commands run in."""

import os

import pytest

from tests.refusals import material


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the material, in which the commands run, and a cache of its own."""
    folder, before = tmp_path_factory.mktemp("refusals"), os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIDUA_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        material.make(folder)
        os.chdir(folder)
        yield folder
        os.chdir(before)
