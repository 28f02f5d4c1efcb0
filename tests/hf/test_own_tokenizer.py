"""A model keeps the tokenizer it was made with: from the hub, by revision, through a fine-tune, before a prompt."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.evaluate.opened import open_model
from residua.lab.finetune import MODEL

NAME = "me/tiny"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
END, START = 256, 257


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


def tokenizer(template):
    """Every byte a token, in another order than that of bytes, and `<bos>` before every text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({each: place for place, each in enumerate(symbols)} | {"<end>": END}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<end>", "<bos>"])
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", START)])
    made = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<end>", bos_token="<bos>")
    made.chat_template = template
    return made


def save(folder, template, vocab=START + 1, context=64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=context, initializer_range=0.3, bos_token_id=START, eos_token_id=END,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A model of the hub with two revisions, as the cache of the hub keeps it."""
    cache = tmp_path_factory.mktemp("hub")
    for revision in COMMITS:
        save(snapshot(cache, NAME, revision), f"template of {revision}")
    return cache


def snapshot(cache, name, revision):
    """Where the cache has the files of a revision."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(COMMITS[revision])
    return repository / "snapshots" / COMMITS[revision]


@pytest.fixture
def hub(cached, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cached


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"hello world number {number}, this is text {number * number}. " * 40)
    return ("--corpus", f"dir:{folder}", "--steps", 1, "--context", 16, "--batch", 2, "--eval-windows", 2)


def template_of(folder):
    return AutoTokenizer.from_pretrained(folder).chat_template


def test_finetune_of_a_hub_name_uses_the_tokenizer_of_the_model_and_leaves_it_there(hub, flags, tmp_path):
    run = tmp_path / "run"
    invoke("finetune", NAME, "--out", run, "--design", "delta", *flags)
    assert json.loads((run / "config.json").read_text())["tokenizer"] == f"hf:{NAME}"
    assert json.loads((run / "tokenizer.json").read_text())["end"] == END
    theirs = AutoTokenizer.from_pretrained(run / MODEL)
    assert theirs("hello").input_ids == tokenizer("")("hello").input_ids
    assert theirs.chat_template == "template of main"


def test_finetune_of_a_directory_keeps_its_chat_template(flags, tmp_path):
    folder = save(tmp_path / "plain", "mine")
    invoke("finetune", folder, "--out", tmp_path / "run", *flags)
    assert template_of(tmp_path / "run" / MODEL) == "mine"


def test_run_on_bytes_is_opened_with_bytes_though_the_checkpoint_had_a_tokenizer(flags, tmp_path):
    folder = save(tmp_path / "plain", "mine")
    invoke("finetune", folder, "--out", tmp_path / "run", "--tokenizer", "bytes", *flags)
    for place in (tmp_path / "run", tmp_path / "run" / MODEL):
        assert open_model(place).tokenizer.name == "bytes", place


def test_hub_name_without_a_tokenizer_asks_for_one(hub, flags, tmp_path):
    done = CliRunner().invoke(app, ["train", "--tokenizer", "hf:me/nosuch", "--out", str(tmp_path / "run")])
    assert "hf:me/nosuch: me/nosuch is not a directory with a tokenizer.json, nor" in str(done.exception)


def test_convert_of_a_revision_takes_the_tokenizer_of_that_revision(hub, tmp_path):
    for name in COMMITS:
        invoke("convert", NAME, "--design", "delta", "--revision", name, "--out", tmp_path / name)
        assert template_of(tmp_path / name) == f"template of {name}"
        shutil.copytree(tmp_path / name, snapshot(hub, "me/made", name))
    for name in COMMITS:
        invoke("convert", "me/made", "--to", "standard", "--revision", name, "--out", tmp_path / f"{name}-back")
        assert template_of(tmp_path / f"{name}-back") == f"template of {name}"


def test_directory_with_a_slow_tokenizer_is_not_opened_with_bytes(tmp_path):
    folder = save(tmp_path / "plain", "mine", vocab=300)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer\.json; write one there"):
        open_model(folder)


def test_generate_begins_as_the_tokenizer_of_the_model_does(tmp_path):
    folder = save(tmp_path / "plain", "mine")
    ours = json.loads(invoke("generate", folder, "-p", "hello", "-n", 6, "--temperature", 0, "--json"))
    given = AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt")
    assert given.input_ids[0, 0] == START
    made = AutoModelForCausalLM.from_pretrained(folder).generate(**given, max_new_tokens=6, do_sample=False)
    assert ours["tokens"] == made[0, given.input_ids.shape[1] :].tolist()
    assert invoke("generate", folder, "-p", "hello", "-n", 6, "--temperature", 0).startswith("hello")


def test_ids_that_only_the_model_has_are_no_text(tmp_path):
    """A vocabulary is padded to a multiple of something, and an untrained row may be sampled as any other."""
    folder = save(tmp_path / "plain", "mine", vocab=320)
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(folder)
        model.lm_head.weight[300:] = 40 * model.lm_head.weight[:20]  # one of them is sure to be the likeliest
        model.save_pretrained(folder)
    found = json.loads(invoke("generate", folder, "-p", "hello", "-n", 8, "--temperature", 0, "--json"))
    assert max(found["tokens"]) >= 300
    assert found["text"] == AutoTokenizer.from_pretrained(folder).decode(found["tokens"], skip_special_tokens=True)
    assert isinstance(open_model(folder).continued([1], 3, lambda text: False), str)


def test_inspect_shows_what_the_model_is_given_before_a_prompt(tmp_path):
    """The routing of a prompt is that of generation, with <bos> where the tokenizer has one, by its name."""
    folder = save(tmp_path / "plain", "mine")
    invoke("convert", folder, "--design", "delta", "--out", tmp_path / "made")
    found = json.loads(invoke("inspect", tmp_path / "made", "-p", "hello", "--json"))
    assert found["tokens"] == ["<bos>", *"hello"]
    assert open_model(tmp_path / "made").begun("hello") == AutoTokenizer.from_pretrained(folder)("hello").input_ids


@pytest.mark.eval
def test_tasks_are_asked_as_the_harness_asks_a_model_of_hugging_face(flags, tmp_path):
    """With <bos> where the tokenizer has one, in the windows of the harness; a conversion that changes nothing scores
    as its checkpoint. Bytes of our own are asked by us."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from residua.lab.data import prepare
    from residua.lab.evaluate.harness import evaluate
    from residua.lab.evaluate.local import NAMES, write_tasks

    folder = save(tmp_path / "plain", "mine", context=256)
    invoke("convert", folder, "--design", "delta:blocks=2", "--out", tmp_path / "made")
    opened = open_model(folder)
    tokens = prepare(flags[1], opened.tokenizer)
    write_tasks(tmp_path / "tasks", tokens, count=6)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    theirs = simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "dtype": "float32"}, tasks=list(NAMES), task_manager=manager,
        bootstrap_iters=0, device="cpu",
    )["results"]  # fmt: skip
    for model, batch in ((opened, 1), (opened, 3), (open_model(tmp_path / "made"), 3)):
        ours = evaluate(model, NAMES, tokens, count=6, batch=batch)
        for name, metrics in ours.items():
            expected = {key: theirs[name][f"{key},none"] for key in metrics}
            assert metrics == pytest.approx(expected, rel=1e-5), (name, batch)
    invoke("finetune", folder, "--out", tmp_path / "run", "--tokenizer", "bytes", *flags)
    assert open_model(tmp_path / "run").folder is None
    assert open_model(tmp_path / "made").folder == tmp_path / "made"
