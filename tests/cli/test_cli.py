"""The command line: messages on standard error, exit codes, and what a process imports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.cli import invoke, refuse, start_whorl, succeed
from tests.support.notes import NOTES_RECIPE, write_notes

from whorl.cli import VERBS
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus, its recipe, and the store `.whorl` of a first run."""
    folder = write_notes(tmp_path_factory.mktemp("home"))
    printed = succeed(folder, "run", "tiny.toml").stdout
    assert "[4/4] tokens: made in" in printed and "done in" in printed
    return folder


def imported_modules(*words: str, cwd: Path | None = None) -> tuple[str, str]:
    """Run `whorl` in a new process; return its output and the list of large packages that it imported."""
    code = f"import sys; sys.argv = {['whorl', *words]}\nfrom whorl.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'pyarrow', 'duckdb', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)
    output, _, modules = done.stdout.rstrip().rpartition("\n")
    return output, modules


def test_modules_of_the_working_directory_can_be_named(tmp_path: Path) -> None:
    """Of the installed command too, whose search path begins with the folder of the script (here: -P)."""
    (tmp_path / "mine.py").write_text("from whorl.train.optim.soap import SOAP as Mine\n")
    code = (
        "import sys; sys.argv = ['whorl', '--version']\nfrom whorl.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "from whorl.train.optim.optimizer import get_optimizer; print(get_optimizer('mine:Mine').__name__)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "SOAP", done.stderr


def test_warning_is_one_line_without_source() -> None:
    code = (
        "import sys, warnings; sys.argv = ['whorl', '--version']\nfrom whorl.cli import main\n"
        "try: main()\nexcept SystemExit: warnings.warn('decoding by torch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "whorl: warning: decoding by torch\n"


def test_help_imports_no_large_package() -> None:
    output, modules = imported_modules("--help")
    assert modules == "[]" and "whorl run quickstart" in output


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_has_example(verb: str, tmp_path: Path) -> None:
    help_text = succeed(tmp_path, verb, "--help").stdout
    assert "Example" in help_text and f"whorl {verb}" in help_text


def test_second_run_imports_no_torch(home: Path) -> None:
    output, modules = imported_modules("run", "tiny.toml", cwd=home)
    assert output.count(": looked up") == 4 and modules.startswith("[") and "torch" not in modules


def test_edited_source_is_ingested_again(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "notes", tmp_path / "notes")
    shutil.copy(home / "tiny.toml", tmp_path)
    (tmp_path / "notes" / "3.txt").write_text("Changed, " * 40)
    done = succeed(tmp_path, "run", "tiny.toml", "--until", "ingest", "--store", home / ".whorl")
    assert "[1/1] ingest: made in" in done.stdout
    succeed(home, "run", "tiny.toml")  # restores the names


def test_store_verbs_show_artifacts(home: Path) -> None:
    listed = succeed(home, "ls").stdout
    assert "tiny/tokens" in listed and "tiny/ingest" in listed
    shown = succeed(home, "show", "tokens").stdout
    assert "tiny/tokens  (tokens)" in shown and "train-00000.bin" in shown and "shard_tokens" in shown
    manifest = json.loads(succeed(home, "show", "tokens", "--json").stdout)
    tree = json.loads(succeed(home, "lineage", "tokens", "--json").stdout)
    assert tree["address"] == manifest["address"]
    assert tree["parents"]["selection"]["parents"]["documents"]["name"] == "tiny/ingest"
    drawn = succeed(home, "lineage", manifest["address"][:8]).stdout
    assert "└─ tokenizer: tiny/tokenizer" in drawn and "(see above)" in drawn
    assert "no damage found" in succeed(home, "verify").stdout
    succeed(home, "gc")
    assert "quickstart" in succeed(home, "recipes").stdout


def test_damage_is_reported_and_repaired(home: Path) -> None:
    path = next((home / ".whorl" / "artifacts").glob("*/tokenizer.json"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    found = invoke(home, "verify", "tokens")
    assert found.exit_code == 1 and str(path) in found.stdout and "1 problem found" in found.stderr
    assert "moved to" in succeed(home, "run", "tiny.toml").stdout
    succeed(home, "verify")


def test_user_errors_have_no_traceback(home: Path) -> None:
    message = refuse(home, "run", "tiny.toml", "--set", "tokenizer.vocab_size=3")
    assert message.startswith("whorl: --set tokenizer.vocab_size=3: tokenizer.vocab_size cannot be '3'")
    assert "no artifact 'model'" in refuse(home, "show", "model", code=1)
    assert "nowhere" in refuse(home, "run", "tiny.toml", "--set", 'ingest.sources=["nowhere"]', code=1)


def test_empty_store_hints_at_quickstart(tmp_path: Path) -> None:
    assert "whorl run quickstart" in succeed(tmp_path, "ls").stdout
    assert "this store is empty" in refuse(tmp_path, "show", "x", code=1)
    assert "no run 'x'" in refuse(tmp_path, "report", "x", code=1)


def test_ctrl_c_exits_130_and_run_continues(tmp_path: Path) -> None:
    write_notes(tmp_path, 500, 800, recipe=NOTES_RECIPE.replace("= 2000", "= 200_000"))
    # Background jobs of a shell inherit an ignored SIGINT.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = start_whorl("run", "tiny.toml", cwd=tmp_path, env=unbuffered, **options)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[2/4] curate: Measure"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("interrupted; the same command continues")
    assert "Traceback" not in errors
    assert "[1/2] ingest: looked up" in succeed(tmp_path, "run", "tiny.toml", "--until", "curate").stdout


def test_rl_train_writes_results_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    sizes = ("--seeds", 2, "--steps", 3000, "--episodes", 3, "--set", "n_steps=16")
    printed = succeed(tmp_path, "rl", "train", "a2c", "CartPole-v1", *sizes).stdout
    assert "interquartile mean of 2 seeds" in printed
    agent = Store(tmp_path / ".whorl").open("rl/a2c-CartPole-v1")
    result = json.loads(agent.file("result.json").read_text())
    assert len(result["returns"]) == 2 and result["settings"]["n_steps"] == 16
    assert {"curve.html", "report.json", "result.json", "seed-0.safetensors", "seed-1.safetensors"} == set(
        agent.files
    )
    assert str(agent.file("curve.html")) in printed
    assert "--set FIELD=VALUE" in refuse(tmp_path, "rl", "train", "ppo", "CartPole-v1", "--set", "rate")
    assert "unknown environment 'Nothing-v0'" in refuse(tmp_path, "rl", "train", "ppo", "Nothing-v0")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tiny Llama of transformers in `tiny llama` and in the store, and that model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **shape)
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(folder / "tiny llama")
    printed = succeed(folder, "import", "tiny llama").stdout
    assert "llama: 0.0 M parameters" in printed and "whorl export imported/tiny-llama FOLDER" in printed
    assert "no tokenizer.json in" in printed and "whorl sample" not in printed
    for name in ("full", "multimodal"):
        (folder / name).mkdir()
    for name, broken in (("empty words", "{}"), ("nan", None)):
        shutil.copytree(folder / "tiny llama", folder / name)
        if broken is not None:
            (folder / name / "tokenizer.json").write_text(broken)
    weights = load_file(folder / "nan" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "nan" / "model.safetensors", {"format": "pt"})
    shutil.copytree(folder / "tiny llama", folder / "other words")
    Tokenizer.train(["words of another model"], 300).save(folder / "other words")
    (folder / "full" / "file").touch()
    fields = json.loads((folder / "tiny llama" / "config.json").read_text())
    (folder / "multimodal" / "config.json").write_text(json.dumps(fields | {"model_type": "gemma3"}))
    return folder, reference


def test_import_and_export_llama(llama: tuple[Path, Any]) -> None:
    import torch

    folder, reference = llama
    assert "looked up" in succeed(folder, "import", "tiny llama").stdout
    assert succeed(folder, "export", "tiny-llama", "out").stdout == "llama: out\n"
    exported = type(reference).from_pretrained(folder / "out").eval()
    ids = torch.arange(12)[None]
    assert torch.allclose(reference(ids).logits, exported(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("import", "full"), "contains no model"),
        (("import", "Some/Model"), "hf download REPOSITORY --local-dir Model"),
        (("import", "multimodal"), "save the text part separately"),
        (("export", "tiny-llama", "full"), "is not empty"),
        (("export", "tiny-llama", "new", "--to", "gpt2"), "cannot be written as that family"),
        (("export", "tiny-llama", "new", "--to", "clip"), "imported/tiny-llama is a language model"),
        (("export", "tiny-llama", "new", "--to", "lama"), "did you mean 'llama'"),
        (("export", "tiny-llama", "full/file", "--to", "gguf"), "file exists"),
    ],
)
def test_import_and_export_refuse(llama: tuple[Path, Any], words: tuple[str, ...], message: str) -> None:
    if "gguf" in words:
        pytest.importorskip("gguf")
    assert message in refuse(llama[0], *words)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty words", "empty words/tokenizer.json cannot be read as a tokenizer"),
        ("other words", "tokens, and the model 50 rows"),
        ("nan", "final_norm.weight has NaN or infinite values"),
    ],
)
def test_import_refuses_what_cannot_generate(llama: tuple[Path, Any], name: str, message: str) -> None:
    found = invoke(llama[0], "import", name)
    assert found.exit_code == 1 and message in found.output


def test_sample_uses_tokenizer_of_imported_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    core.train_from_iterator(["the cat and the dog and the bird"] * 5, trainer)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24}
    config = transformers.GPT2Config(vocab_size=288, eos_token_id=0, **shape)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "tiny")
    words.save_pretrained(tmp_path / "tiny")
    path = tmp_path / "tiny" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["zzz"] = 400  # a gap beyond the last row of the model
    path.write_text(json.dumps(data))
    succeed(tmp_path, "import", "tiny")
    for prompt, length in (("the cat and", 100), ("é", 6), ("hi 🙂", 6), ("日本語", 6)):
        # The last token of the prompt is generated again; it may end a character that earlier tokens began.
        done = succeed(tmp_path, "sample", "imported/tiny", prompt, "-n", length, "--temperature", 0)
        assert done.stdout.startswith(prompt)
        if length == 100:
            (*ids, last), n_forced = words(prompt).input_ids, 0
            room, rest = 24 - len(ids), words.decode([last])
            while rest:  # greedy, among the tokens that agree with the end of the prompt
                scores = model(torch.tensor([ids])).logits[0, -1].tolist()
                texts = {n: words.decode([n]) for n in range(len(core.get_vocab()))}
                fitting = [n for n, t in texts.items() if t and (rest.startswith(t) or t.startswith(rest))]
                ids.append(max(fitting, key=scores.__getitem__))
                n_forced += len(texts[ids[-1]]) <= len(rest)  # a longer one also begins the continuation
                rest = rest[len(texts[ids[-1]]) :]
            assert int(done.stderr.split()[0]) == room - n_forced, done.stderr
    for prompt, message in (
        ("the " + "xyz" * 12, "the model's context holds 24"),
        ("caf\udce9 au lait", "the prompt cannot be read"),  # the argument was no UTF-8
    ):
        failed = invoke(tmp_path, "sample", "imported/tiny", prompt)
        assert failed.exit_code == 2 and message in failed.stderr and failed.stdout == ""


def test_import_and_export_vit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **shape)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "pictures")
    assert "vit: 0.0 M parameters" in succeed(tmp_path, "import", "pictures").stdout
    assert succeed(tmp_path, "export", "pictures", "out").stdout == "vit: out\n"
    transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    assert "is a vision model" in refuse(tmp_path, "export", "pictures", "out2", "--to", "llama")
    assert "of the kind vision" in refuse(tmp_path, "sample", "pictures", "x")
