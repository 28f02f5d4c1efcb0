"""Converted models behind transformers' own server, in batches that change as they run, and in ONNX."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from typer.testing import CliRunner

from residua.cli import app
from residua.testing import error
from tests.hf.models import converted, ids
from tests.hf.test_commands import bytes_tokenizer

SIZES = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 256}
PAGES = {"block_size": 16, "num_blocks": 16, "max_batch_tokens": 64}
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = converted("llama", "delta:blocks=2", moved=True, **SIZES)
    model.save_pretrained(folder)
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}it:"
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")  # what the server's own packages say of each other
def test_chat_in_continuous_batches(served):
    from starlette.testclient import TestClient
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState

    folder, model, tokenizer = served
    manager = ModelManager(device="cpu", dtype="auto")
    state = GenerationState(continuous_batching=True, cb_config=ContinuousBatchingConfig(**PAGES))
    app = build_server(
        manager,
        ChatCompletionHandler(model_manager=manager, generation_state=state),
        generation_state=state,
        **{f"{name}_handler": None for name in ("completion", "response", "transcription", "systemone")},
    )
    wanted = {"model": str(folder), "messages": SAID, "max_tokens": 5, "temperature": 0}
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=wanted)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == greedy(model, tokenizer)


@pytest.mark.filterwarnings("ignore")
def test_continuous_batching_gives_the_tokens_of_each_prompt_alone(served):
    model = served[1]
    prompts = [row[: 3 + place].tolist() for place, row in enumerate(ids(3, 9))]
    how = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=256, pad_token_id=0)
    found = model.generate_batch(
        prompts, generation_config=how, continuous_batching_config=ContinuousBatchingConfig(**PAGES)
    )
    model.set_attn_implementation("sdpa")
    for prompt, answer in zip(prompts, found.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
        assert answer.generated_tokens == alone.tolist()


def test_continuous_batching_of_a_stream_that_remembers_is_refused():
    model = converted("llama", "standard", layout="canon,attn,mlp")
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match="pages of continuous batching"):
        model(ids())


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
def test_command_serves_a_chat(served, monkeypatch):
    """`residua serve DIR -- --port ...`, asked once through the OpenAI protocol while it runs."""
    import uvicorn

    folder, model, tokenizer = served
    ready, kept = threading.Event(), []

    class Server(uvicorn.Server):
        def install_signal_handlers(self):
            """A thread has none."""

        async def startup(self, sockets=None):
            await super().startup(sockets)
            kept.append(self)
            ready.set()

    monkeypatch.setattr(uvicorn, "Server", Server)
    options = ["--port", "0", "--device", "cpu", "--log-level", "error"]
    asked = threading.Thread(target=lambda: CliRunner().invoke(app, ["serve", str(folder), "--", *options]))
    asked.start()
    try:
        assert ready.wait(60), "the server did not start"
        port = kept[0].servers[0].sockets[0].getsockname()[1]
        from openai import OpenAI

        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        answer = client.chat.completions.create(model=str(folder), messages=SAID, max_tokens=5, temperature=0)
    finally:
        for server in kept:
            server.should_exit = True
        asked.join(60)
    assert not asked.is_alive()
    assert answer.choices[0].message.content == greedy(model, tokenizer)


SERVE = """
import sys
from transformers.cli.transformers import app
assert "residua" not in sys.modules
app(["serve", sys.argv[1], "--port", sys.argv[2], "--trust-remote-code", "--device", "cpu", "--log-level", "error"])
"""


@pytest.mark.clients
def test_transformers_alone_serves_a_chat_by_the_saved_shim(served, tmp_path):
    """`transformers serve DIR --trust-remote-code`, in a process that has not imported residua."""
    from openai import APIConnectionError, OpenAI

    folder, model, tokenizer = served
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    with (tmp_path / "said").open("w+") as said:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder), str(port)], env=environment, stdout=said, stderr=said
        )
        try:
            for _ in range(600):
                assert server.poll() is None, (tmp_path / "said").read_text()[-3000:]
                try:
                    answer = client.chat.completions.create(
                        model=str(folder), messages=SAID, max_tokens=5, temperature=0
                    )
                    break
                except APIConnectionError:  # it does not listen yet
                    time.sleep(0.2)
            else:
                pytest.fail((tmp_path / "said").read_text()[-3000:])
        finally:
            server.kill()
            server.wait()
    assert answer.choices[0].message.content == greedy(model, tokenizer)


def greedy(model, tokenizer):
    """What the model says to `SAID` in a call of `generate`."""
    prompt = tokenizer.apply_chat_template(SAID, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens)


@pytest.mark.clients
def test_wrong_name_is_said_before_the_server_starts(tmp_path):
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing")])
    assert "neither a directory nor a model" in str(done.exception)


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("design", ["delta:blocks=2", "attnres:blocks=2"])
def test_onnxruntime_gives_the_same_logits(design, tmp_path):
    """Through the command, from a saved model."""
    import onnxruntime

    model = converted("llama", design, moved=True)
    model.save_pretrained(tmp_path / "made")
    bytes_tokenizer().save_pretrained(tmp_path / "made")
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "made"), "--to", "onnx", "--out", str(tmp_path / "out"), "--json"]
    )
    assert json.loads(done.stdout.splitlines()[-1] if done.stdout.startswith("[") else done.stdout)["to"] == "onnx"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    for rows, tokens in ((2, 9), (3, 14)):
        mask = torch.ones_like(ids(rows, tokens))
        mask[0, :3] = 0  # a row that is padded on the left
        (found,) = session.run(None, {"input_ids": ids(rows, tokens).numpy(), "attention_mask": mask.numpy()})
        with torch.no_grad():
            wanted = model(ids(rows, tokens), attention_mask=mask).logits
        assert error(torch.from_numpy(found)[mask > 0], wanted[mask > 0]) < 2e-6


def test_export_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    from residua.hf import export

    def broken(model, file):
        file.write_text("half a graph")
        raise RuntimeError("no such operator")

    monkeypatch.setattr(export, "export_onnx", broken)
    converted("llama", "delta:blocks=2").save_pretrained(tmp_path / "made")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "made"), "--to", "onnx", "--out", str(tmp_path / "out")])
    assert "no such operator" in str(done.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
