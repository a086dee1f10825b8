"""The command line in real processes: messages on standard error and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.cli import run_whorl, spell, write_notes

from whorl.cli import VERBS
from whorl.store import Store

RECIPE = """\
name = "tiny"
[steps.ingest]
sources = ["{source}"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 2000
test_bytes = 2000
max_held_out_fraction = 0.3
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = 320
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus, its recipe, and the store `.whorl` of a first run."""
    folder = tmp_path_factory.mktemp("home")
    write_notes(folder)
    (folder / "tiny.toml").write_text(RECIPE.format(source="notes"))
    done = run_whorl("run", "tiny.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "[4/4] tokens: made in" in done.stdout and "done in" in done.stdout
    return folder


def test_help_is_fast_and_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['whorl', '--help']\nfrom whorl.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += (
        "print([name for name in ('torch', 'pyarrow', 'duckdb', 'pydantic', 'numpy') if name in sys.modules])"
    )
    fastest, output = 99.0, ""
    for _ in range(3):
        began = time.monotonic()
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        fastest = min(fastest, time.monotonic() - began)
    assert output.endswith("[]\n") and "whorl run quickstart" in output
    assert fastest < 1.5  # about 0.1 s on an idle machine


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_has_example(verb: str) -> None:
    help_text = run_whorl(verb, "--help").stdout
    assert "Example" in help_text and f"whorl {verb}" in help_text


def test_second_run_imports_no_torch(home: Path) -> None:
    code = (
        "import sys; sys.argv = ['whorl', 'run', 'tiny.toml']\nfrom whorl.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=home)
    assert done.stdout.count(": looked up") == 4 and done.stdout.endswith("False\n"), done.stdout


def test_edited_source_is_ingested_again(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for path in (home / "notes").iterdir():
        (tmp_path / "notes" / path.name).write_text(path.read_text())
    (tmp_path / "notes" / "3.txt").write_text("Changed, " * 40)
    (tmp_path / "tiny.toml").write_text(RECIPE.format(source="notes"))
    done = run_whorl("run", "tiny.toml", "--until", "ingest", "--store", home / ".whorl", cwd=tmp_path)
    assert "[1/1] ingest: made in" in done.stdout, done.stderr
    run_whorl("run", "tiny.toml", cwd=home)  # restores the names


def test_store_verbs_show_artifacts(home: Path) -> None:
    listed = run_whorl("ls", cwd=home).stdout
    assert "tiny/tokens" in listed and "tiny/ingest" in listed
    shown = run_whorl("show", "tokens", cwd=home).stdout
    assert "tiny/tokens  (tokens)" in shown and "train-00000.bin" in shown and "shard_tokens" in shown
    manifest = json.loads(run_whorl("show", "tokens", "--json", cwd=home).stdout)
    tree = json.loads(run_whorl("lineage", "tokens", "--json", cwd=home).stdout)
    assert tree["address"] == manifest["address"]
    assert tree["parents"]["selection"]["parents"]["documents"]["name"] == "tiny/ingest"
    drawn = run_whorl("lineage", manifest["address"][:8], cwd=home).stdout
    assert "└─ tokenizer: tiny/tokenizer" in drawn and "(see above)" in drawn
    assert "no damage found" in run_whorl("verify", cwd=home).stdout
    assert run_whorl("gc", cwd=home).returncode == 0


def test_recipes_lists_quickstart() -> None:
    assert "quickstart" in run_whorl("recipes").stdout


def test_damage_is_reported_and_repaired(home: Path) -> None:
    path = next((home / ".whorl" / "artifacts").glob("*/tokenizer.json"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    found = run_whorl("verify", "tokens", cwd=home)
    assert found.returncode == 1 and str(path) in found.stdout and "1 problem found" in found.stderr
    repaired = run_whorl("run", "tiny.toml", cwd=home)
    assert repaired.returncode == 0 and "moved to" in repaired.stdout
    assert run_whorl("verify", cwd=home).returncode == 0


def test_user_errors_have_no_traceback(home: Path) -> None:
    refused = run_whorl("run", "tiny.toml", "--set", "tokenizer.vocab_size=3", cwd=home)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert refused.stderr.startswith(
        "whorl: --set tokenizer.vocab_size=3: tokenizer.vocab_size cannot be '3'"
    )
    unknown = run_whorl("show", "model", cwd=home)
    assert unknown.returncode == 1 and "no artifact 'model'" in unknown.stderr
    source = run_whorl("run", "tiny.toml", "--set", 'ingest.sources=["nowhere"]', cwd=home)
    assert source.returncode == 1 and "nowhere" in source.stderr and "Traceback" not in source.stderr


def test_empty_store_hints_at_quickstart(tmp_path: Path) -> None:
    assert "whorl run quickstart" in run_whorl("ls", cwd=tmp_path).stdout
    assert "this store is empty" in run_whorl("show", "x", cwd=tmp_path).stderr


def test_ctrl_c_exits_130_and_run_continues(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(1500):
        rng = random.Random(number)
        lines = (" ".join(spell(rng.randrange(10**6)) for _ in range(4)) for _ in range(200))
        (tmp_path / "notes" / f"{number}.txt").write_text("\n".join(lines))
    (tmp_path / "tiny.toml").write_text(RECIPE.format(source="notes").replace("= 2000", "= 200_000"))
    process = subprocess.Popen(
        [sys.executable, "-m", "whorl.cli", "run", "tiny.toml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Background jobs of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[2/4] curate: Measure"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("interrupted; the same command continues")
    assert "Traceback" not in errors
    continued = run_whorl("run", "tiny.toml", "--until", "curate", cwd=tmp_path)
    assert "[1/2] ingest: looked up" in continued.stdout and continued.returncode == 0


def test_rl_train_writes_results_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    done = subprocess.run(
        [sys.executable, "-m", "whorl.cli", "rl", "train", "a2c", "CartPole-v1", "--seeds", "2", "--steps", "3000",
         "--episodes", "3", "--set", "n_steps=16"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "inter-quartile mean of 2 seeds" in done.stdout
    agent = Store(tmp_path / ".whorl").open("rl/a2c-CartPole-v1")
    result = json.loads(agent.file("result.json").read_text())
    assert len(result["returns"]) == 2 and result["settings"]["n_steps"] == 16
    assert {"curve.html", "result.json", "seed-0.safetensors", "seed-1.safetensors"} == set(agent.files)
    assert str(agent.file("curve.html")) in done.stdout
    for arguments, message in (
        (["dqn", "CartPole-v1"], "unknown algorithm 'dqn'"),
        (["ppo", "CartPole-v1", "--set", "lr=1"], "unknown agent setting 'lr'"),
        (["ppo", "CartPole-v1", "--set", "rate"], "--set FIELD=VALUE"),
        (["ppo", "Nothing-v0"], "unknown environment 'Nothing-v0'"),
    ):
        failed = subprocess.run(
            [sys.executable, "-m", "whorl.cli", "rl", "train", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr


def test_import_and_export_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "tiny llama")
    done = run_whorl("import", "tiny llama", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "llama: 0.0 M parameters" in done.stdout and "whorl export imported/tiny-llama FOLDER" in done.stdout
    )
    assert "looked up" in run_whorl("import", "tiny llama", cwd=tmp_path).stdout
    done = run_whorl("export", "tiny-llama", "out", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "llama: out\n", done.stderr
    fields = json.loads((tmp_path / "tiny llama" / "config.json").read_text())
    for name, change in (
        ("nameless", {"model_type": None}),
        ("multimodal", {"model_type": "gemma3"}),
        ("strange", {"zeal": 3}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields | change))
    ids = torch.arange(12)[None]
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(reference(ids).logits, exported(ids).logits, atol=1e-5)
    for words, message in (
        (("import", "out2"), "contains no model"),
        (("export", "tiny-llama", "out", "--to", "llama"), "is not empty"),
        (("export", "tiny-llama", "out3", "--to", "gpt2"), "cannot be written as that family"),
        (("export", "tiny-llama", "out3", "--to", "lama"), "did you mean 'llama'"),
        (("import", "nameless"), "field 'model_type' is missing"),
        (("import", "multimodal"), "save the text part separately"),
        (("import", "strange"), "--ignore zeal"),
        (("export", "tiny-llama", "out/config.json", "--to", "gguf"), "config.json exists"),
    ):
        if "gguf" in words and importlib.util.find_spec("gguf") is None:
            continue
        failed = run_whorl(*words, cwd=tmp_path)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr


def test_sample_uses_tokenizer_of_imported_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import tokenizers
    import torch

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    core.train_from_iterator(["the cat and the dog and the bird"] * 5, trainer)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=288, n_embd=32, n_layer=2, n_head=2, n_positions=24, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    words.save_pretrained(tmp_path / "tiny")
    path = tmp_path / "tiny" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["zzz"] = 400  # a gap beyond the last row of the model
    path.write_text(json.dumps(data))
    assert run_whorl("import", "tiny", cwd=tmp_path).returncode == 0
    done = run_whorl(
        "sample", "imported/tiny", "the cat and", "-n", "100", "--temperature", "0", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the cat and")
    n_tokens = (
        24 - (len(words("the cat and").input_ids) - 1) + 1
    )  # the last token of the prompt is generated again
    assert done.stderr.startswith(f"{n_tokens} tokens"), done.stderr
    for prompt in ("é", "hi 🙂", "日本語"):  # the last token ends a character that earlier tokens began
        done = run_whorl("sample", "imported/tiny", prompt, "-n", "6", "--temperature", "0", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith(prompt), done.stderr
    for prompt, message in (
        ("the " + "xyz" * 12, "at most 24, the longest row of imported/tiny"),
        (b"caf\xe9 au lait", "the prompt cannot be read"),
    ):
        command = [sys.executable, "-m", "whorl.cli", "sample", "imported/tiny", prompt]
        failed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr
        assert failed.stdout == ""


def test_import_and_export_vit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "pictures")
    done = run_whorl("import", "pictures", cwd=tmp_path)
    assert done.returncode == 0 and "vit: 0.0 M parameters" in done.stdout, done.stderr
    done = run_whorl("export", "pictures", "out", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "vit: out\n", done.stderr
    transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    for words, message in (
        (("export", "pictures", "out2", "--to", "llama"), "is a vision model"),
        (("sample", "pictures", "x"), "is a vision"),
    ):
        failed = run_whorl(*words, cwd=tmp_path)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr
