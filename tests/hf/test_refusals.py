"""Every row of the table of refusals of Hugging Face checkpoints, by `convert`, `eval`, `finetune` and loading."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from tests.hf.models import base, converted
from tests.refusals import hugging_face, material
from tests.refusals.harness import check_refused, lying, residua


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    base("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("harm", "words"), [row[1:] for row in hugging_face.ROWS], ids=[row[0] for row in hugging_face.ROWS]
)
def test_convert(plain, tmp_path, harm, words):
    folder = shutil.copytree(plain, tmp_path / "model")
    harm(folder)
    before = lying(tmp_path)
    check_refused(residua("convert", str(folder), "-d", "delta", "--out", str(tmp_path / "out"), "--json"), words)
    assert lying(tmp_path) == before, "something was written"


@pytest.mark.parametrize("command", ["eval {model} --corpus dir:{corpus}",
                                     "finetune {model} --corpus dir:{corpus} --steps 1 --out {out}",
                                     "inspect {model} -p x", "generate {model} -p x"])  # fmt: skip
def test_every_command_refuses_a_checkpoint_without_layers(plain, tmp_path, monkeypatch, command):
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(plain, tmp_path / "model")
    hugging_face.dropped("model.layers.")(folder)
    material.lay(tmp_path / "corpus", a_txt="abc " * 400, b_txt="xyz " * 300)
    said = residua(*command.format(model=folder, corpus=tmp_path / "corpus", out=tmp_path / "out").split())
    check_refused(said, "they lack model.layers.0.input_layernorm.weight")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("stream", "the file lacks model.stream."), ("layers.0.mlp.up_proj", "they lack model.layers.0.mlp.up_proj")],
)
def test_converted_model_without_some_of_its_tensors_does_not_load(tmp_path, pattern, words):
    converted("llama", "delta:blocks=2").save_pretrained(tmp_path)
    hugging_face.dropped(pattern)(tmp_path)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_whole_checkpoint_converts(plain, tmp_path):
    said = residua("convert", str(plain), "-d", "delta", "--out", str(tmp_path / "out"), "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["identity"]["max_gap"] == 0
