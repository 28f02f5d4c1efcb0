"""`import residua` is enough for the Auto classes, in any order, and costs no import of transformers."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.hf.models import converted, ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = converted("llama", "delta:blocks=2", moved=True)
    model.save_pretrained(folder)
    with torch.no_grad():
        total = model(ids()).logits.double().sum().item()
    return folder, total


def run(code, *arguments):
    """The output of code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    print(type(model).__name__, model(ids).logits.double().sum().item())
"""
ORDERS = {
    "residua first": "import json, sys, torch, residua\nassert 'transformers' not in sys.modules\n"
    "from transformers import AutoModelForCausalLM",
    "residua last": "import json, sys, torch\nfrom transformers import AutoModelForCausalLM\nimport residua",
    "residua between": "import json, sys, torch, transformers, residua\nfrom transformers import AutoModelForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_saved_model_loads_after_importing_residua(order, saved):
    folder, total = saved
    name, found = run(ORDERS[order] + LOAD, folder, json.dumps(ids().tolist())).split()
    assert name == "ResiduaLlamaForCausalLM"
    assert float(found) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_saved_shim_loads_without_importing_residua(saved, monkeypatch, tmp_path):
    folder, total = saved
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    code = "import json, sys, torch\nfrom transformers import AutoModelForCausalLM" + LOAD.replace(
        "(sys.argv[1])", "(sys.argv[1], trust_remote_code=True)"
    )
    name, found = run(code, folder, json.dumps(ids().tolist())).split()
    assert name == "ResiduaLlamaForCausalLM"
    assert float(found) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_registration_leaves_no_finder_behind_and_imports_no_model():
    run(
        """
        import sys, residua
        from residua._arrival import Arrival
        from importlib.util import find_spec

        waiting = lambda: {each.watched.split(".")[0] for each in sys.meta_path if isinstance(each, Arrival)}
        assert waiting() == {"transformers", "peft"}
        assert not any(name.startswith("residua.hf") for name in sys.modules)
        assert residua.convert.__name__ == "convert"
        assert find_spec("transformers.models.auto.configuration_auto")
        assert waiting() == {"transformers", "peft"}
        from transformers import AutoConfig
        assert waiting() == {"peft"}
        assert "transformers.models.llama.modeling_llama" not in sys.modules
        config = AutoConfig.for_model("residua_llama", stream={"name": "standard"})
        assert type(config).__name__ == "ResiduaLlamaConfig", config
        import peft
        assert not waiting()
        """
    )


def test_shim_holds_no_model_code(saved):
    text = (saved[0] / "modeling_residua.py").read_text()
    assert "def " not in text
    assert "residua" in text
    config = json.loads((saved[0] / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_residua.ResiduaLlamaForCausalLM"
    assert config["model_type"] == "residua_llama"
